"""The segments of a cycle in the order of time, with what changes when each begins."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from actckpt.planner.costs import CostTable, Segment

__all__ = ["Moment", "moments"]


class Moment(NamedTuple):
    """A segment of the cycle, and what changes when it begins."""

    segment: Segment
    #: An entry takes its seconds in the first segment of its own in each direction.
    seconds: float
    #: Values come back in it, and none go: a backward runs, or ran last.
    is_backward: bool
    #: Entries whose forward has ended since the segment before, and whose backward begins.
    handed: tuple[int, ...]
    consumed: tuple[int, ...]
    #: Entries whose values can come back by now, in the order of backward: the forward of each has ended.
    readable: tuple[int, ...]


def moments(costs: CostTable) -> tuple[Moment, ...]:
    """Return the segments of a cycle."""
    entries = range(len(costs.stack))
    runs = [(segment.running, segment.is_forward) for segment in costs.timeline]
    begins = {run: number for number, run in reversed(list(enumerate(runs)))}
    ends = {index: number for number, (index, is_forward) in enumerate(runs) if is_forward}
    backwards = sorted((index for index in entries if (index, False) in begins), key=lambda j: begins[j, False])
    found: list[Moment] = []
    is_backward = False
    for number, segment in enumerate(costs.timeline):
        index, seconds = segment.running, segment.seconds
        is_first = begins[runs[number]] == number
        if index >= 0:
            is_backward = not segment.is_forward
            block = costs.blocks[index]
            seconds = (block.backward_s if is_backward else block.forward_s) * is_first
        handed = tuple(entry for entry in entries if ends.get(entry) == number - 1)
        consumed = (index,) if index >= 0 and is_first and not segment.is_forward else ()
        readable = tuple(itertools.takewhile(lambda j: ends.get(j, -1) < number, backwards))  # noqa: B023
        found.append(Moment(segment, seconds, is_backward, handed, consumed, readable))
    return tuple(found)
