"""What stays of a replay within a window of bytes: pure functions of a small graph.

NOTE [ Windows ]

A replay passes many values that the same backward asks for later (NOTE [ Needs ]). All of them stay if they fit. If
they do not, the last of them stay, which backward asks for next, and before those the few values that lead on from some
points of the order, the *cuts*: the stretch between two cuts is replayed again when its turn comes, with what the
window has room for by then, and is cut again where it must be.

Where to cut (Griewank and Walther 2000, with bytes in the place of steps): with room for R bytes and cuts of k bytes, a
stretch of F(R, 0) = R bytes is executed once. If each of its steps may run r times more, it may be as long as
F(R, r) = F(R, r - 1) + F(R - k, r): up to the first cut with one repetition less, and from there with a cut less room.
So with room for c values, n steps take at most n * r executions, n = (c + r)! / (c! r!): for c = log n, O(n log n).

Backward goes through a block of `apply` at once, and takes as much memory as a checkpoint of it would: there, all stays
where the setting follows the sizes seen.
"""

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from actckpt._replay.replay_graph import ReplayGraph

__all__ = ["LEAST_GAIN", "retained", "smallest_window"]

#: Where the setting follows the sizes seen, all stays where the window would not be so many times smaller: a block of a
#: model is better executed once.
LEAST_GAIN = 4
#: How far above the smallest window the one that is found may be.
_PRECISION = 1.05


def retained(graph: ReplayGraph, order: Sequence[int], room_bytes: int) -> set[int]:
    """Return the values to keep of those that `order` makes, at most `room_bytes` of them.

    Cost: O(steps * cuts).
    """
    line = _Line.of(graph, order)
    found: set[int] = set()
    start, room = 0, room_bytes
    while line.asked(start) > room and (cut := line.cut(start, room)) is not None:
        found |= line.crossing(start, cut.position)
        start, room = cut.position, room - cut.nbytes
    for value, nbytes, _ in itertools.chain.from_iterable(reversed(line.made[start:])):
        if value in graph.retained:
            room -= nbytes
            if room < 0:
                break
            found.add(value)
    return found


def smallest_window(graph: ReplayGraph, order: Sequence[int]) -> int:
    """Return about the smallest window with which no step runs more than twice, in bytes."""
    line = _Line.of(graph, order)
    low, high = 1, max(line.asked(0), 1)
    while high > low * _PRECISION + 1:
        middle = int((low * high) ** 0.5) + 1  # below `high`, above `low`
        low, high = (low, middle) if line.runs_twice_at_most(middle) else (middle, high)
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
        return cls(made, [0, *itertools.accumulate(asked)])

    def asked(self, start: int) -> int:
        """Return the bytes made from `start` on that stay if they have room."""
        return self.asked_before[-1] - self.asked_before[start]

    def crossing(self, start: int, position: int) -> set[int]:
        """Return the values that a cut at `position` keeps of those made since `start`."""
        return {value for at in self.made[start:position] for value, _, last in at if last >= position}

    def cut(self, start: int, room: int, most_repetitions: int | None = None) -> _Cut | None:
        """Return the first cut after `start`; None where there is no room for one, or more repetitions are needed."""
        before, cuts = self.asked_before[start], self._cuts(start)
        for cut in cuts:
            if self.asked_before[cut.position - 1] - before > room:
                break
            if self.asked(cut.position) <= room - cut.nbytes:  # no further cut is needed
                return cut
        smallest = min((cut.nbytes for cut in cuts if cut.nbytes), default=0)
        if not 0 < smallest <= room:
            return None
        one = self.asked(start) / (len(self.made) - start)
        span = _span_before_cut(self.asked(start), room, smallest, one, most_repetitions)
        if span is None:
            return None
        low = bisect.bisect_left(self.asked_before, before + span[0], start + 1)
        high = max(bisect.bisect_right(self.asked_before, before + span[1], start + 1), low)
        found = min(reversed(cuts[low - start - 1 : high - start]), key=lambda cut: cut.nbytes, default=None)
        return found if found is not None and found.nbytes <= room else None

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

    def runs_twice_at_most(self, room: int) -> bool:
        """Whether each step runs at most twice in a window."""
        start = 0
        while self.asked(start) > room:
            cut = self.cut(start, room, most_repetitions=1)
            if cut is None:
                return False
            start, room = cut.position, room - cut.nbytes
        return True


def _span_before_cut(
    asked: float, room: int, cut_bytes: int, one: float, most_repetitions: int | None
) -> tuple[float, float] | None:
    """Return how many bytes to have before the first cut, at least and at most, for the fewest executions in all.

    Args:
        asked: bytes of the whole stretch.
        one: of the value that is asked for, which takes no room.
    Returns:
        None if some steps would run more than `most_repetitions` times again.
    """
    #: F(R - j * k, r - 1) for each number j of cuts, in the terms of NOTE [ Windows ]; and F(R, r - 2).
    lengths = [room - number * cut_bytes + one for number in range(min(room // cut_bytes, int(asked / one)) + 1)]
    shorter, repetitions = 0.0, 1
    while sum(lengths) < asked:
        if repetitions == most_repetitions:
            return None
        shorter, repetitions = lengths[0], repetitions + 1
        lengths = list(itertools.accumulate(reversed(lengths), initial=one))[:0:-1]
    # Before the cut, as long as with r - 1 repetitions; after it, as with r; neither of them as with one less.
    after = lengths[1] if len(lengths) > 1 else one
    return max(asked - sum(lengths[1:]), shorter), min(lengths[0] - one, asked - after)
