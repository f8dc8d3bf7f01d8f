"""What stays of a replay where not all has room: pure functions of a small graph.

NOTE [ Windows ]

A replay passes many values that the same backward asks for later (NOTE [ Needs ]). In a region of a block all of them
stay: backward goes through it at once, and takes as much memory as a checkpoint of it would. In a region of many blocks
those stay that fit into a *window*: about the fewest bytes with which no step runs more than twice in a backward.

*Cuts* divide the order of the steps. The few values that lead on across a cut stay. The stretch between two cuts is
replayed again when its turn comes, and then all of it stays. Backward takes the last stretch first, and has released
the cuts behind a stretch by then. So with a window of R bytes and cuts of k bytes, stretches may have R, R - k,
R - 2 k, ... bytes, and the last one stays at once: the window of n values grows with the root of n.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from actckpt._replay.replay_graph import ReplayGraph

__all__ = ["LEAST_GAIN", "SMALL_BYTES", "retained", "smallest_window"]

#: Bytes that stay cached even where the window is smaller.
SMALL_BYTES = 4 << 20

#: All stays where the window would not be so many times smaller: a block of a model is better executed once.
LEAST_GAIN = 4
#: How far above the smallest window the one that is found may be.
_PRECISION = 1.05


def retained(graph: ReplayGraph, order: Sequence[int], room_bytes: int) -> set[int] | None:
    """Return the values to keep of those that `order` makes, within `room_bytes`; None: a step would run three times.

    Cost: O(steps * cuts).
    """
    return _Line.of(graph, order).retained(room_bytes)


def smallest_window(graph: ReplayGraph, order: Sequence[int]) -> int:
    """Return about the smallest window with which no step runs more than twice, in bytes."""
    line = _Line.of(graph, order)
    low, high = 1, max(line.asked(0), 1)
    while high > low * _PRECISION + 1:
        middle = int((low * high) ** 0.5) + 1  # below `high`, above `low`
        low, high = (middle, high) if line.retained(middle) is None else (low, middle)
    return high


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A point to come back to: what was made before it and is read from there on stays."""

    position: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Line:
    """The values of a replay that backward comes back to, along the order of the steps."""

    #: At each position: value, bytes, and the last position that reads it.
    made: list[list[tuple[int, int, int]]]
    #: Bytes made before each position that stay if they have room.
    asked_before: list[int]
    #: Values that stay if they have room.
    wanted: frozenset[int]

    @classmethod
    def of(cls, graph: ReplayGraph, order: Sequence[int]) -> "_Line":
        positions = {step: position for position, step in enumerate(order)}
        last = {
            value: position
            for position, step in enumerate(order)
            if not graph.again.isdisjoint(graph.makes[step])
            for value in graph.reads[step]
        }
        # Others than these steps may read a value before step `until`: where that step, or one after it, stands.
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
        """Return the bytes made from `start` on that stay if they have room."""
        return self.asked_before[-1] - self.asked_before[start]

    def retained(self, room: int) -> set[int] | None:
        """Return the values across the cuts and those after the last one, None where that takes more room."""
        found: set[int] = set()
        start = 0
        while self.asked(start) > room:
            cut = self._cut(start, room)
            if cut is None:
                return None
            found |= {value for at in self.made[start : cut.position] for value, _, last in at if last >= cut.position}
            start, room = cut.position, room - cut.nbytes
        rest = itertools.chain.from_iterable(self.made[start:])
        return found | {value for value, _, _ in rest if value in self.wanted}

    def _cut(self, start: int, room: int) -> _Cut | None:
        """Return the next cut after `start`, None where there is no room for one.

        That is the first one after which all has room, else the one with the fewest bytes per byte before it.
        """
        best, least = None, float("inf")
        for cut in self._cuts(start):
            before = self.asked_before[cut.position] - self.asked_before[start]
            if self.asked_before[cut.position - 1] - self.asked_before[start] > room:
                break  # the value that is asked for takes no room: what stands before it does
            if before == 0 or cut.nbytes > room:
                continue
            if self.asked(cut.position) <= room - cut.nbytes:
                return cut
            if cut.nbytes / before <= least:
                best, least = cut, cut.nbytes / before
        return best

    def _cuts(self, start: int) -> list[_Cut]:
        """Return the cuts at all positions after `start`, beside what one at `start` keeps."""
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
