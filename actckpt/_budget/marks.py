"""Marks of a step: when blocks begin and end, and what is alive then; and what runs outside of blocks, from marks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from actckpt._core import devices
from actckpt.memory import LiveStorages
from actckpt.planner.costs import BlockClass, Value

__all__ = ["Mark", "Marks", "Outside", "between", "held_after", "last_end", "outside_bytes", "outside_seconds"]

#: Name of the value that stands for what the stem leaves.
_HELD = "(held)"


@dataclasses.dataclass(frozen=True)
class Outside:
    """What runs outside of blocks, before the first, after the last, or between two: seconds, and bytes."""

    forward_s: float
    backward_s: float
    working_set_bytes: float
    held_bytes: float = 0.0
    gradient_bytes: float = 0.0
    #: Parameters that FSDP2 gathers for the block after it.
    gathered_bytes: float = 0.0

    def counts_before(self, block: BlockClass) -> bool:
        """Return whether it changes what a plan needs, if it runs right before a block."""
        return self.held_bytes > 0.0 or self.working_set_bytes > block.working_set_bytes

    def with_gradients(self, nbytes: int) -> Outside:
        """Return it with gradients that wait while it runs backward."""
        return dataclasses.replace(self, working_set_bytes=self.working_set_bytes + nbytes)

    def block_class(self) -> BlockClass:
        """Return it as a class of blocks."""
        held = (Value(_HELD, self.held_bytes, offloadable=False, replayable=False),) if self.held_bytes else ()
        return BlockClass(self.forward_s, self.backward_s, self.working_set_bytes, self.gradient_bytes, held)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment of a step: `"forward"` of a block begins, `"end"`s, or `"backward"` reaches its output."""

    what: str
    #: Which call of a block in the step, counted from 0; -1: none.
    call: int
    moment: devices.Moment
    live_bytes: int
    #: Most bytes alive since the mark before.
    peak_bytes: int
    #: Of the block's input where its forward begins, of its output where it ends, without what it was given beside its
    #: input and hands on.
    nbytes: int
    #: Of the input of the block before, which lived when that ended, and was moved: it lives no more.
    gone_bytes: int = 0
    #: Of the parameters of a block that begins, which FSDP2 has gathered.
    gathered_bytes: int = 0


class Marks:
    """Takes down marks of one step on a device."""

    def __init__(self, live: LiveStorages | None, device: torch.device) -> None:
        self._live, self._device = live, device
        self.found: list[Mark] = []

    def note(self, what: str, call: int = -1, nbytes: int = 0, gone_bytes: int = 0, gathered_bytes: int = 0) -> None:
        """Take down a mark."""
        live_bytes = peak_bytes = 0
        if self._live is not None:
            live_bytes, peak_bytes = self._live.live_bytes, self._live.peak_bytes
            self._live.reset_peak()
        moment = devices.moment(self._device)
        self.found.append(Mark(what, call, moment, live_bytes, peak_bytes, nbytes, gone_bytes, gathered_bytes))


def outside_seconds(marks: list[Mark], num_calls: int) -> list[tuple[float, float]]:
    """Return forward and backward seconds of stem and head; so many calls of blocks are between them."""
    stem, head = [0.0, 0.0], [0.0, 0.0]
    for mark, after in itertools.pairwise(marks):
        seconds = devices.seconds_between(mark.moment, after.moment)
        if mark.what in ("start", "stem", "done"):  # done: of the optimizer, which ends the step
            stem[mark.what != "start"] += seconds
        elif mark.what == "end" and mark.call == num_calls - 1:
            head[1] += seconds
    return [(stem[0], stem[1]), (head[0], head[1])]


def outside_bytes(marks: list[Mark], num_calls: int, backward_bytes: Sequence[int]) -> tuple[Outside, Outside]:
    """Return what stem and head need, without their seconds.

    Args:
        backward_bytes: by position, the most that was found to live while backward runs there (`Read`).
    """
    first = next(mark for mark in marks if mark.what == "forward")
    end, done = next(pair for pair in itertools.pairwise(marks) if pair[0] == last_end(marks, num_calls))
    held = first.live_bytes - first.nbytes
    stem_peak = head_peak = 0
    for mark, after in itertools.pairwise(marks):
        if mark.what in ("start", "stem"):
            stem_peak = max(stem_peak, after.peak_bytes)
        elif mark is end:
            head_peak = after.peak_bytes
    stem_peak, head_peak = max(stem_peak, backward_bytes[0]), max(head_peak, backward_bytes[-1])
    head_bytes = head_peak - _below(end, done)  # the last output is the head's own
    return Outside(0.0, 0.0, float(stem_peak), float(max(held, 0))), Outside(0.0, 0.0, float(max(head_bytes, 0)))


def last_end(marks: list[Mark], num_calls: int) -> Mark:
    """Return the mark at which the last block ended."""
    return next(mark for mark in marks if mark.what == "end" and mark.call == num_calls - 1)


def _below(end: Mark, after: Mark) -> int:
    """Return what is held below the output of a block that ended, as it is at the mark after that."""
    return end.live_bytes - end.nbytes - after.gone_bytes


def held_after(marks: list[Mark], num_calls: int) -> int:
    """Return what is held at the last mark of what ran after the last block."""
    return marks[-1].live_bytes - _below(last_end(marks, num_calls), marks[-1])


def _pairs(marks: list[Mark], num_calls: int) -> list[tuple[Mark, Mark]]:
    """Return for each two calls of blocks in a row where the former ends and the latter begins."""
    begins = {mark.call: mark for mark in marks if mark.what == "forward"}
    ends = {mark.call: mark for mark in marks if mark.what == "end"}
    return [(ends[call], begins[call + 1]) for call in range(num_calls - 1)]


def between(marks: list[Mark], num_calls: int, backward_bytes: Sequence[int]) -> list[Outside]:
    """Return for each two calls of blocks in a row what runs between them, without its seconds."""
    found = []
    for (end, begin), backward in zip(_pairs(marks, num_calls), backward_bytes[2:-1:2], strict=True):
        held = max(begin.live_bytes - begin.nbytes - _below(end, begin), 0)
        needed = float(max(max(begin.peak_bytes, backward) - _below(end, begin), 0))  # with the output of the former
        gathered = min(begin.gathered_bytes, held)
        found.append(Outside(0.0, 0.0, needed, float(held - gathered), gathered_bytes=float(gathered)))
    return found
