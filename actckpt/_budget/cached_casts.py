"""Casts of parameters that autocast caches: how they count.

NOTE [ Casts in the cache ]

Rule 1. A cast that autocast caches lives until the program leaves autocast, whatever a plan does with it: mostly from
        the block's forward to the end of that of the model. In backward what is kept of them lives as values do. No
        plan is taken to free them, or to need them twice: they count as held by what runs before the first block, all
        of them all the time, and not as values. So backward needs beside them what the graph shows that it needs
        without them, where they were gone; plans that drop them need less then. Where the program runs backward under
        autocast, too, they live on, as do those of a head; those of a block are there while it runs backward, beside
        what it makes of them then. Where it runs several forwards in one autocast, each with its backward, casts are
        made in the first one alone, and autograd comes to what made them after all that the later forwards ran: in
        their backward gradients of casts wait until its end. They are there from where backward comes to their block.
        A forward of another size that finds casts in the cache when it is measured holds them, too, all the time.
Rule 2. Where the program leaves autocast between two blocks, the casts of the former are gone when the latter begins:
        they are values like any other. Those of the last block are as those before it.
Rule 3. Runs of a block on its own are without the cache, which would hold the casts of what is lent to them
        (`apart.set_apart`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from actckpt._budget.marks import Mark
from actckpt._budget.profiled_block import Cast, ProfiledBlock

if TYPE_CHECKING:
    from actckpt._budget.measuring import MeasuredStep

__all__ = ["CachedCasts", "CastBytes", "beside_casts", "holding_casts"]

#: Name of the value that stands for casts outside of blocks that live in backward.
_CASTS = "(casts)"


class CastBytes(NamedTuple):
    """Bytes of the casts of parameters that a call of a block left in the cache of autocast."""

    made: int
    #: Of those, what lives on when the forward of the model has ended.
    lasting: int


class CachedCasts:
    """Follows the casts of each call of a block through a forward."""

    def __init__(self) -> None:
        self._calls: list[tuple[Cast, ...]] = []
        #: Casts of other forwards by the id of their reference: that, their bytes, and which block found them last.
        self._others: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}
        #: Per call of a block, of those that live when backward comes to the first block; and of those made after it.
        self._in_backward: list[int] = []
        self._after_blocks_bytes = 0

    def call_begins(self) -> None:
        """Another call begins: casts that live no more are no longer cached."""
        self._calls = [_alive(casts) for casts in self._calls]

    def call_ended(self, block: ProfiledBlock, has_made: Callable[[torch.UntypedStorage], bool]) -> None:
        """That call has ended.

        Args:
            has_made: whether this forward made a storage, outside of calls of blocks.
        """
        self._calls.append(block.casts)
        own = {id(cast.storage) for casts in self._calls for cast in casts}
        for ref, nbytes in block.found_casts:
            storage = ref()
            if storage is not None and id(ref) not in own and not has_made(storage):
                self._others[id(ref)] = ref, nbytes, block.name

    def found(self) -> dict[str, int]:
        """Return by name of a block bytes of casts that another forward made, and that it was the last one to find."""
        found: dict[str, int] = {}
        for _, nbytes, name in self._others.values():
            found[name] = found.get(name, 0) + nbytes
        return found

    def backward_reached(self, after_bytes: int) -> None:
        """Backward has come to a block, and casts of so many bytes live that were made after that."""
        if not self._in_backward:
            self._in_backward = [_nbytes(_alive(casts)) for casts in self._calls]
            self._after_blocks_bytes = after_bytes

    def completed(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured of the step, once its backward has ended, with the casts that lived in that."""
        if not any(self._in_backward):
            return measured
        left = iter(self._in_backward)
        needed = [
            block.working_set_bytes + (0 if name is None else next(left))
            for name, block in zip(measured.names, measured.costs.blocks, strict=True)
        ]
        needed[0] += sum(self._in_backward) + self._after_blocks_bytes  # its own values count with what it needs
        found = measured.needing(needed).holding(_CASTS, self._after_blocks_bytes)
        left = iter(self._in_backward)
        return dataclasses.replace(found, cast_bytes=tuple(0 if name is None else next(left) for name in found.names))

    def are_alive(self) -> bool:
        """Return whether some are there still: where another forward begins, it finds them in the cache."""
        return any(map(_alive, self._calls))

    def settled(self, blocks: Sequence[ProfiledBlock]) -> tuple[list[ProfiledBlock], list[CastBytes]]:
        """Return the calls of blocks, and what each of them left in the cache, when the model's forward has ended."""
        if any(block.casts for block in blocks[:-1]) and not any(self._calls[:-1]):
            self._calls[-1] = ()
        found = [block.with_casts(casts) for block, casts in zip(blocks, self._calls, strict=True)]
        lasting = self._in_backward or [_nbytes(_alive(casts)) for casts in self._calls]
        return found, [CastBytes(_nbytes(casts), nbytes) for casts, nbytes in zip(self._calls, lasting, strict=True)]


def _alive(casts: Sequence[Cast]) -> tuple[Cast, ...]:
    return tuple(cast for cast in casts if cast.storage() is not None)


def _nbytes(casts: Sequence[Cast]) -> int:
    return sum(cast.nbytes for cast in casts)


def holding_casts(marks: Sequence[Mark], casts: Sequence[CastBytes]) -> list[Mark]:
    """Return marks in which all casts are there all the time (Rule 1).

    Args:
        casts: per call of a block.
    """
    total, made, lasting, found = sum(each.made for each in casts), 0, 0, []
    for mark in marks:
        if mark.what == "end":
            made, lasting = made + casts[mark.call].made, lasting + casts[mark.call].lasting
        passing_bytes = max(mark.passing_bytes - (made - lasting), 0)
        lasting_bytes = mark.lasting_bytes + total - lasting
        found.append(dataclasses.replace(mark, lasting_bytes=lasting_bytes, passing_bytes=passing_bytes))
    return found


def beside_casts(backward_bytes: Sequence[int], casts: Sequence[CastBytes]) -> list[int]:
    """Return the most that lives while backward runs outside of blocks, by position, with all casts there (Rule 1).

    Args:
        backward_bytes: without those that live no more when the model's forward has ended (`Read`).
        casts: per call of a block.
    """
    gone = sum(each.made for each in casts)
    found = list(backward_bytes)
    for number, each in enumerate(casts):
        gone -= each.lasting
        place = 2 * number + 2
        found[place] += gone if found[place] else 0
    return found
