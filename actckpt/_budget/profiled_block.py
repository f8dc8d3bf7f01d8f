"""The profiled costs of one block call: its class in a cost table, and the places of its values."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from actckpt._budget.block_bytes import BlockPeaks
from actckpt.planner.costs import BlockClass

__all__ = ["OTHER", "Cast", "ProfiledBlock"]

#: Name of the value for all other bytes that a block holds (see `profiling`).
OTHER = "(other)"


class Cast(NamedTuple):
    """A copy of a parameter in another dtype, which autocast caches."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    #: Its name in the cost table.
    name: str


@dataclasses.dataclass(frozen=True)
class ProfiledBlock:
    """One call of a block."""

    name: str
    costs: BlockClass
    #: The place of each value in the model, by its name in the cost table.
    places: dict[str, str]
    #: By phase and mode.
    peaks: BlockPeaks
    #: The storage of its input, and that storage's bytes.
    input: weakref.ref[torch.UntypedStorage] | None
    input_bytes: int
    #: The storages of values that it returned, by name in the cost table.
    returned: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    #: Casts of its parameters in autocast's cache: they do not count as values.
    casts: tuple[Cast, ...] = ()
    #: The storages of values by name in the cost table; and the storages of its arguments, with their bytes.
    made: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    arguments: tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...] = ()
    #: The storages of its results.
    results: tuple[weakref.ref[torch.UntypedStorage], ...] = ()

    def with_casts(self, casts: tuple[Cast, ...], *, counts_others_twice: bool) -> ProfiledBlock:
        """Return the block with only these casts in the cache; the others are values that were in it in forward.

        Args:
            counts_others_twice: they are ordinary values.
        """
        lost = {cast.name: cast.nbytes for cast in self.casts if cast not in casts}
        if not lost:
            return self
        block = self._with_values(lost)
        values = [
            dataclasses.replace(value, cached=value.name in lost and not counts_others_twice)
            for value in block.costs.values
        ]
        return dataclasses.replace(block, costs=dataclasses.replace(block.costs, values=tuple(values)), casts=casts)

    def _with_values(self, sizes: Mapping[str, float]) -> ProfiledBlock:
        values = tuple(
            dataclasses.replace(value, nbytes=sizes.get(value.name, value.nbytes)) for value in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))
