"""What one call of a block costs, as it was profiled: its class in a cost table, and where its values are."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from actckpt.planner.costs import BlockClass

__all__ = ["OTHER", "ProfiledBlock"]

#: Name of the value of Rule 4 of NOTE [ Profiling a block ].
OTHER = "(other)"


@dataclasses.dataclass(frozen=True)
class ProfiledBlock:
    """One call of a block."""

    name: str
    costs: BlockClass
    #: Where each value is in the model, by its name in the cost table.
    places: dict[str, str]
    #: The storage of its input, and the bytes of that.
    input: weakref.ref[torch.UntypedStorage] | None
    input_bytes: int
    #: The storages of values that it returned, by their names in the cost table.
    returned: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)

    def before(self, other: ProfiledBlock) -> ProfiledBlock:
        """Return the block without the bytes of what it returned and the next block has for its input, which stays.

        Where that may be moved, it is gone only if both let go of it: then both have its bytes.
        """
        shared = {name for name, storage in self.returned.items() if storage is other.input}
        if other.costs.values[0].offloadable:
            return self
        if not shared:
            return self
        values = (
            dataclasses.replace(value, nbytes=0.0, offloadable=False) if value.name in shared else value
            for value in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=tuple(values)))

    def is_input_gone(self) -> bool:
        """Return whether its input lives no more."""
        return self.input is not None and self.input() is None

    def with_input_kept(self) -> ProfiledBlock:
        """Return the block without the choice to offload its input if that is still alive."""
        if self.input is None or self.is_input_gone():
            return self
        values = (dataclasses.replace(self.costs.values[0], offloadable=False), *self.costs.values[1:])
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))

    def with_other(self, nbytes: float) -> ProfiledBlock:
        """Return the block with so many more bytes that stay unless it runs again."""
        if not nbytes:
            return self
        values = tuple(
            dataclasses.replace(value, nbytes=value.nbytes + nbytes) if value.name == OTHER else value
            for value in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))

    def with_gradients(self, nbytes: int) -> ProfiledBlock:
        """Return the block with gradients that wait while it runs backward."""
        needed = self.costs.working_set_bytes + nbytes
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, working_set_bytes=needed))
