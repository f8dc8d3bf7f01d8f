"""What one call of a block costs, as it was profiled: its class in a cost table, and where its values are."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from actckpt._budget.block_bytes import BlockPeaks
from actckpt._budget.marks import Mark
from actckpt.planner.costs import BLOCK_INPUT, BlockClass

__all__ = ["OTHER", "Cast", "ProfiledBlock", "as_given"]

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
    #: The storage of its input, and the bytes of that.
    input: weakref.ref[torch.UntypedStorage] | None
    input_bytes: int
    #: The storages of values that it returned, by their names in the cost table.
    returned: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    #: What its forward needs at most, with its input.
    forward_bytes: float = 0.0
    #: Of what something held when the forward had ended, which counts with the input: storages, and names of those that
    #: are values.
    held: tuple[tuple[weakref.ref[torch.UntypedStorage], int, str | None], ...] = ()
    #: Of its parameters, in the cache of autocast: they count neither as values nor in the working set.
    casts: tuple[Cast, ...] = ()
    #: Storages of casts that it found there, and their bytes.
    found_casts: tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...] = ()
    #: Of phases and modes, where these were asked for.
    peaks: BlockPeaks | None = None
    #: The storages of values by their names in the cost table, and those that the call was given, with their bytes.
    made: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    arguments: tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...] = ()
    #: The storages of what the call returned.
    results: tuple[weakref.ref[torch.UntypedStorage], ...] = ()

    def before(self, other: ProfiledBlock) -> ProfiledBlock:
        """Return the block that knows which of its values the next block has for its input, too.

        Where that stays, they have no bytes.
        """
        shared = {name for name, storage in self.returned.items() if storage is other.input}
        if not shared:
            return self
        may_go = other.costs.values[0].offloadable or not other.costs.values[0].needed
        values = (
            dataclasses.replace(
                value,
                nbytes=value.nbytes if may_go else 0.0,
                offloadable=value.offloadable and may_go,
                next_input=may_go,
            )
            if value.name in shared
            else value
            for value in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=tuple(values)))

    def is_input_gone(self) -> bool:
        """Return whether its input lives no more."""
        return self.input is not None and self.input() is None

    def with_input_kept(self) -> ProfiledBlock:
        """Return the block without the choice to offload its input if that is still alive, although it was moved."""
        may_go = self.costs.values[0].offloadable
        return self if not may_go or self.input is None or self.is_input_gone() else self._with_input(0)

    def with_casts(self, casts: tuple[Cast, ...]) -> ProfiledBlock:
        """Return the block of which only these casts stay in the cache; the others are values like any other."""
        lost = {cast.name: cast.nbytes for cast in self.casts if cast not in casts}
        if not lost:
            return self
        block, nbytes = self._with_values(lost), sum(lost.values())
        costs = dataclasses.replace(block.costs, working_set_bytes=block.costs.working_set_bytes + nbytes)
        return dataclasses.replace(block, costs=costs, forward_bytes=block.forward_bytes + nbytes, casts=casts)

    def _with_input(self, more_bytes: float) -> ProfiledBlock:
        """Return the block with an input that has so many more bytes, and stays."""
        given, *values = self.costs.values
        nbytes = max(given.nbytes + more_bytes, 0.0)
        given = dataclasses.replace(given, nbytes=nbytes, needed=True, offloadable=False)
        needed = max(self.costs.working_set_bytes + more_bytes, 0.0)
        costs = dataclasses.replace(self.costs, values=(given, *values), working_set_bytes=needed)
        return dataclasses.replace(self, costs=costs, forward_bytes=max(self.forward_bytes + more_bytes, 0.0))

    def given(self, mark: Mark) -> ProfiledBlock:
        """Return the block as the step shows it in which its forward began at a mark, once that forward has ended."""
        new_bytes = mark.nbytes - self.input_bytes
        block = self._with_input(new_bytes) if new_bytes else self
        return block.without_replaced()._while_passing(mark.passing_bytes)

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

    def _while_passing(self, nbytes: float) -> ProfiledBlock:
        """Return the block with so much in memory, while its forward runs, that is gone in backward."""
        needed = max(self.costs.working_set_bytes, self.forward_bytes + nbytes)
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, working_set_bytes=needed))

    def _with_values(self, sizes: Mapping[str, float]) -> ProfiledBlock:
        values = tuple(
            dataclasses.replace(each, nbytes=sizes.get(each.name, each.nbytes)) for each in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))

    def with_other(self, nbytes: float) -> ProfiledBlock:
        """Return the block with so many more bytes that stay unless it runs again."""
        if not nbytes:
            return self
        return self._with_values({each.name: each.nbytes + nbytes for each in self.costs.values if each.name == OTHER})

    def with_gradients(self, nbytes: int) -> ProfiledBlock:
        """Return the block with gradients that wait while it runs backward."""
        needed = self.costs.working_set_bytes + nbytes
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, working_set_bytes=needed))


def as_given(blocks: Sequence[ProfiledBlock], begun: Sequence[Mark]) -> list[ProfiledBlock]:
    """Return calls of blocks as the step shows them in which they began at marks, once its forward has ended.

    What several of them are given, whole or in parts, stays: none of them may move it.
    """
    found = [block.given(mark) for block, mark in zip(blocks, begun, strict=True)]
    num_given = Counter(id(block.input) for block in blocks)  # a storage has one weak reference, while that lives
    return [block if num_given[id(block.input)] == 1 else block._with_input(0) for block in found]
