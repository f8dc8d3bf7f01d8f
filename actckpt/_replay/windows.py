"""Which results of a replay stay cached if not all fit: pure functions of a small graph.

NOTE [ Windows ]

A replay makes many values that the same backward needs later (NOTE [ Needs ]). In a region of one block all of them
stay cached: backward passes through it in one go, and needs as much memory as a checkpoint of the block. In a region of
many blocks, those stay that fit in a *window*: about the fewest bytes with which no step runs more than twice per
backward.

*Cuts* divide the order of the steps. The few values that are read across a cut stay. A stretch between two cuts is
replayed again when backward reaches it, and then stays as a whole. Backward takes the last stretch first; by then the
cuts behind a stretch are released. So with a window of R bytes and cuts of k bytes, stretches may have R, R - k,
R - 2 k, ... bytes, and the last one stays at once. The window of n values grows with the square root of n.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from actckpt._replay.replay_graph import ReplayGraph

__all__ = ["LEAST_GAIN", "SMALL_BYTES", "retained", "smallest_window"]

#: Bytes that stay cached even if the window is smaller.
SMALL_BYTES = 4 << 20

#: Everything stays unless the window is this many times smaller: one block is better executed once.
LEAST_GAIN = 4
#: Tolerance of the search, relative to the smallest window.
_PRECISION = 1.05


def retained(graph: ReplayGraph, order: Sequence[int], room_bytes: int) -> set[int] | None:
    """Return which values made by `order` to keep within `room_bytes`; None: a step would run three times.

    Cost: O(steps * cuts).
    """
    return _Line.of(graph, order).retained(room_bytes)


def smallest_window(graph: ReplayGraph, order: Sequence[int]) -> int:
    """Return approximately the smallest window, in bytes, with which no step runs more than twice."""
    line = _Line.of(graph, order)
    low, high = 1, max(line.asked(0), 1)
    while high > low * _PRECISION + 1:
        middle = int((low * high) ** 0.5) + 1  # below `high`, above `low`
        low, high = (middle, high) if line.retained(middle) is None else (low, middle)
    return high


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A restart point: values made before it and read after it stay."""

    position: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Line:
    """The retained values of a replay, along the order of the steps."""

    #: At each position: value, bytes, and the last position that reads it.
    made: list[list[tuple[int, int, int]]]
    #: Bytes made before each position that stay if they fit.
    asked_before: list[int]
    #: Values that stay if they fit.
    optional: frozenset[int]

    @classmethod
    def of(cls, graph: ReplayGraph, order: Sequence[int]) -> "_Line":
        positions = {step: position for position, step in enumerate(order)}
        last = {
            value: position
            for position, step in enumerate(order)
            if not graph.again.isdisjoint(graph.makes[step])
            for value in graph.reads[step]
        }
        # Steps outside this graph may read a value before step `until`: take the latest position up to that step.
        latest = list(itertools.accumulate((positions.get(step, 0) for step in range(len(graph.makes))), max))
        made = []
        for position, step in enumerate(order):
            again = [value for value in graph.makes[step] if value in graph.again and value != graph.target]
            others = {value: latest[min(graph.until.get(value, 0), len(latest) - 1)] for value in again}
            made.append(
                [(value, graph.nbytes[value], max(position, last.get(value, 0), others[value])) for value in again]
            )
        asked = [sum(nbytes for value, nbytes, _ in at if value in graph.retained) for at in made]
        return cls(made, [0, *itertools.accumulate(asked)], graph.retained)

    def asked(self, start: int) -> int:
        """Return the bytes made from `start` on that stay if they fit."""
        return self.asked_before[-1] - self.asked_before[start]

    def retained(self, room: int) -> set[int] | None:
        """Return the values across the cuts and those after the last cut; None if they exceed `room`."""
        values: set[int] = set()
        start = 0
        while self.asked(start) > room:
            cut = self._cut(start, room)
            if cut is None:
                return None
            values |= {value for at in self.made[start : cut.position] for value, _, last in at if last >= cut.position}
            start, room = cut.position, room - cut.nbytes
        rest = itertools.chain.from_iterable(self.made[start:])
        return values | {value for value, _, _ in rest if value in self.optional}

    def _cut(self, start: int, room: int) -> _Cut | None:
        """Return the next cut after `start`; None if there is no room for one.

        It is the first one after which everything fits, else the one with the fewest bytes per byte before it.
        """
        best, least = None, float("inf")
        for cut in self._cuts(start):
            before = self.asked_before[cut.position] - self.asked_before[start]
            if self.asked_before[cut.position - 1] - self.asked_before[start] > room:
                break  # the target takes no room: the values before it do
            if before == 0 or cut.nbytes > room:
                continue
            if self.asked(cut.position) <= room - cut.nbytes:
                return cut
            if cut.nbytes / before <= least:
                best, least = cut, cut.nbytes / before
        return best

    def _cuts(self, start: int) -> list[_Cut]:
        """Return the cuts at all positions after `start`, in addition to what a cut at `start` keeps."""
        cuts = []
        total = 0
        ending: defaultdict[int, int] = defaultdict(int)
        for position in range(start + 1, len(self.made)):
            for _, nbytes, last in self.made[position - 1]:
                total += nbytes
                ending[last + 1] += nbytes
            total -= ending.pop(position, 0)
            cuts.append(_Cut(position, total))
        return cuts
