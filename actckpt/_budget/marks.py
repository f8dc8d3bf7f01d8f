"""Marks of a step: when blocks begin and end, and what is alive then; and what runs outside of blocks, from marks."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from actckpt._core import devices
from actckpt.memory import LiveStorages
from actckpt.planner.costs import BlockClass, Value

__all__ = ["Mark", "Marks", "Outside", "held_between", "outside_bytes", "outside_seconds"]

#: Name of the value that stands for what the stem leaves.
_HELD = "(held)"


@dataclasses.dataclass(frozen=True)
class Outside:
    """What runs outside of blocks, before the first or after the last one: seconds, and bytes."""

    forward_s: float
    backward_s: float
    working_set_bytes: float
    held_bytes: float = 0.0
    gradient_bytes: float = 0.0

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


class Marks:
    """Takes down marks of one step on a device."""

    def __init__(self, live: LiveStorages | None, device: torch.device) -> None:
        self._live, self._device = live, device
        self.found: list[Mark] = []

    def note(self, what: str, call: int = -1, nbytes: int = 0) -> None:
        """Take down a mark."""
        live_bytes = peak_bytes = 0
        if self._live is not None:
            live_bytes, peak_bytes = self._live.live_bytes, self._live.peak_bytes
            self._live.reset_peak()
        self.found.append(Mark(what, call, devices.moment(self._device), live_bytes, peak_bytes, nbytes))


def outside_seconds(marks: list[Mark], num_calls: int) -> list[tuple[float, float]]:
    """Return forward and backward seconds of stem and head; so many calls of blocks are between them."""
    stem, head = [0.0, 0.0], [0.0, 0.0]
    for mark, after in itertools.pairwise(marks):
        seconds = devices.seconds_between(mark.moment, after.moment)
        if mark.what in ("start", "stem"):
            stem[mark.what == "stem"] += seconds
        elif mark.what == "end" and mark.call == num_calls - 1:
            head[1] += seconds
    return [(stem[0], stem[1]), (head[0], head[1])]


def outside_bytes(marks: list[Mark], num_calls: int) -> tuple[Outside, Outside]:
    """Return what stem and head need, without their seconds."""
    first = next(mark for mark in marks if mark.what == "forward")
    end = next(mark for mark in marks if mark.what == "end" and mark.call == num_calls - 1)
    held = first.live_bytes - first.nbytes
    stem_peak = head_peak = 0
    for mark, after in itertools.pairwise(marks):
        if mark.what in ("start", "stem"):
            stem_peak = max(stem_peak, after.peak_bytes)
        elif mark is end:
            head_peak = after.peak_bytes
    head_bytes = head_peak - (end.live_bytes - end.nbytes)  # the last output is the head's own
    return Outside(0.0, 0.0, float(stem_peak), float(max(held, 0))), Outside(0.0, 0.0, float(max(head_bytes, 0)))


def held_between(marks: list[Mark], num_calls: int) -> list[int]:
    """Return for each call of a block what is held of what runs between it and the next one."""
    begins = {mark.call: mark for mark in marks if mark.what == "forward"}
    ends = {mark.call: mark for mark in marks if mark.what == "end"}
    found = []
    for call, after in itertools.pairwise(range(num_calls)):
        before_bytes = ends[call].live_bytes - ends[call].nbytes
        found.append(begins[after].live_bytes - begins[after].nbytes - before_bytes)
    return [*found, 0]
