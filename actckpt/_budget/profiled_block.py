"""What one call of a block costs, as it was profiled: its class in a cost table, and where its values are."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from actckpt._budget.block_bytes import BlockPeaks
from actckpt.planner.costs import BLOCK_INPUT, BlockClass

__all__ = ["OTHER", "Cast", "ProfiledBlock"]

#: Name of the value of Rule 4 of NOTE [ Profiling a block ].
OTHER = "(other)"


class Cast(NamedTuple):
    """A copy of a parameter in another dtype, which autocast caches."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    #: In the cost table.
    name: str


@dataclasses.dataclass(frozen=True)
class ProfiledBlock:
    """One call of a block."""

    name: str
    costs: BlockClass
    #: Where each value is in the model, by its name in the cost table.
    places: dict[str, str]
    #: Of phases and modes.
    peaks: BlockPeaks
    #: The storage of its input, and the bytes of that.
    input: weakref.ref[torch.UntypedStorage] | None
    input_bytes: int
    #: The storages of values that it returned, by their names in the cost table.
    returned: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    #: Of what something held when the forward had ended, which counts with the input: storages, and names of those that
    #: are values.
    held: tuple[tuple[weakref.ref[torch.UntypedStorage], int, str | None], ...] = ()
    #: Of its parameters, in the cache of autocast: they do not count as values.
    casts: tuple[Cast, ...] = ()
    #: The storages of values by their names in the cost table, and those that the call was given, with their bytes.
    made: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    arguments: tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...] = ()
    #: The storages of what the call returned.
    results: tuple[weakref.ref[torch.UntypedStorage], ...] = ()

    def with_casts(self, casts: tuple[Cast, ...]) -> ProfiledBlock:
        """Return the block of which only these casts stay in the cache; the others are values like any other."""
        lost = {cast.name: cast.nbytes for cast in self.casts if cast not in casts}
        if not lost:
            return self
        return dataclasses.replace(self._with_values(lost), casts=casts)

    def without_replaced(self) -> ProfiledBlock:
        """Return the block without what was held when its forward had ended, and is gone: states that were replaced.

        Of the one that is returned nothing goes any more: it is called when the forward of the model has ended.
        """
        gone = [(nbytes, name) for storage, nbytes, name in self.held if storage() is None]
        if not gone:
            return dataclasses.replace(self, held=())
        more = {name: nbytes for nbytes, name in gone if name is not None}
        more[BLOCK_INPUT] = -sum(nbytes for nbytes, _ in gone)
        block = self._with_values({value.name: value.nbytes + more.get(value.name, 0) for value in self.costs.values})
        return dataclasses.replace(block, held=())

    def _with_values(self, sizes: Mapping[str, float]) -> ProfiledBlock:
        values = tuple(
            dataclasses.replace(each, nbytes=sizes.get(each.name, each.nbytes)) for each in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))
