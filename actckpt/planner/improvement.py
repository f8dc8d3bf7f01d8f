"""Actions made better one value at a time, until no change of one value saves time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT
from actckpt.planner.problem import Actions, Array, Choice, Problem
from actckpt.planner.schedule import Schedule, evaluate

__all__ = ["Candidate", "candidate", "improved", "simplified"]

#: A difference below this share of the step is rounding.
_ROUNDING = 1e-9
#: Blocks of candidates that are evaluated at once.
_AT_ONCE = 2**18
_MOST_ROUNDS = 8

#: Other choices for some blocks.
_Changes = Mapping[int, Choice]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Actions of all blocks, and what they come to."""

    actions: tuple[Actions, ...]
    #: Per block: kept bytes, offloaded bytes, recompute seconds, recompute bytes.
    footprints: Array
    #: Of this one candidate.
    schedule: Schedule

    @property
    def overhead_s(self) -> float:
        """Seconds over plain training."""
        return float(self.schedule.overhead_s[0])

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond what there is; 0: it fits."""
        return float(self.schedule.excess_bytes[0])

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better."""
        return self.excess_bytes, self.overhead_s


def candidate(problem: Problem, actions: Sequence[Actions]) -> Candidate | None:
    """Return what actions come to; None where they leave out what backward needs."""
    found = [problem.footprint(index, each) for index, each in enumerate(actions)]
    if None in found:
        return None
    footprints = numpy.array([each[:4] for each in found if each is not None], float)
    return Candidate(tuple(actions), footprints, evaluate(problem, footprints[None]))


def improved(problem: Problem, start: Candidate) -> Candidate:
    """Change values, each time as many of those that gain most as do best together, until no change of one gains."""
    while changes := _useful(problem, start):
        gains = _gains(problem, start, *_scores(problem, start, changes))
        order = [number for number in numpy.argsort(-gains, kind="stable").tolist() if gains[number] > 0.0]
        together: dict[int, Choice] = {}
        growing: list[_Changes] = []
        for number in order:
            ((index, choice),) = changes[number].items()
            if index not in together:
                together[index] = choice
                growing.append(dict(together))
        if not growing:
            break
        overhead_s, excess = _scores(problem, start, growing)
        start = _changed(problem, start, growing[int(numpy.lexsort((overhead_s, excess))[0])])
    return start


def _gains(problem: Problem, start: Candidate, overhead_s: Array, excess: Array) -> Array:
    """Return for each change the seconds that it gains, or the bytes that then fit for the seconds that they cost."""
    rounding = _ROUNDING * problem.scale_s
    if start.excess_bytes > 0.0:
        slower = numpy.maximum(overhead_s - start.overhead_s, 0.0)
        gains: Array = (start.excess_bytes - excess) / (slower + rounding)
    else:
        faster = start.overhead_s - overhead_s
        gains = numpy.where((excess == 0.0) & (faster > rounding), faster, 0.0)
    return gains


def simplified(problem: Problem, start: Candidate) -> Candidate:
    """Drop what need not be held and keep what need not be brought back, where that costs no time."""
    start = _without_free_reruns(problem, _without_remains(problem, start))
    footprints = [problem.footprint(index, actions) for index, actions in enumerate(start.actions)]
    places = [(index, position) for index, block in enumerate(problem.blocks) for position in range(len(block.values))]
    places.reverse()  # what is kept late is kept for a short time
    needed = {(index, position): problem.blocks[index].values[position].needed for index, position in places}
    start = _as_many(problem, start, [place for place in places if not needed[place]], Action.RECOMPUTE)
    brought_back = []
    for index, position in places:
        action = start.actions[index][position]
        footprint = footprints[index]
        if footprint is not None and footprint.rerun and problem.blocks[index].values[position].name != BLOCK_INPUT:
            continue
        if action is Action.OFFLOAD or (action is Action.RECOMPUTE and needed[index, position]):
            brought_back.append((index, position))
    return _as_many(problem, start, brought_back, Action.KEEP)


def _without_remains(problem: Problem, start: Candidate) -> Candidate:
    """Drop all but the inputs of blocks that run again as a whole: that makes all values again and holds none."""
    changes: dict[int, Choice] = {}
    for index, actions in enumerate(start.actions):
        rows = zip(problem.blocks[index].values, actions, problem.allowed[index], strict=True)
        dropped = tuple(
            Action.RECOMPUTE if value.name != BLOCK_INPUT and Action.RECOMPUTE in allowed else action
            for value, action, allowed in rows
        )
        now, then = problem.footprint(index, actions), problem.footprint(index, dropped)
        if now is not None and now.rerun and then is not None:
            changes[index] = Choice(dropped, then)
    return _changed(problem, start, changes) if changes else start


def _without_free_reruns(problem: Problem, start: Candidate) -> Candidate:
    """Keep all of blocks that run again as a whole, the last ones first, where that costs neither time nor room."""
    changes: dict[int, Choice] = {}
    growing: list[_Changes] = []
    for index in reversed(range(len(start.actions))):
        now, then = (problem.footprint(index, each[index]) for each in (start.actions, problem.plain))
        if now is not None and now.rerun and then is not None and not then.rerun:
            changes[index] = Choice(problem.plain[index], then)
            growing.append(dict(changes))
    free = _free(problem, start, growing)
    number = free.index(False) if False in free else len(free)
    return _changed(problem, start, growing[number - 1]) if number else start


def _useful(problem: Problem, start: Candidate) -> list[_Changes]:
    """Return the changes of one value that may gain something."""
    room = numpy.minimum(
        problem.forward_capacity - problem.forward_base,
        problem.backward_capacity - problem.backward_base - start.footprints[:, 3],
    )
    kept_before = numpy.cumsum(start.footprints[:, 0]) - start.footprints[:, 0]
    later = numpy.minimum.accumulate((room - kept_before)[::-1])[::-1]
    spare = numpy.append(later[1:], numpy.inf) + _ROUNDING * problem.forward_capacity
    waits = start.overhead_s - float(start.footprints[:, 2].sum())
    changes: list[_Changes] = []
    footprints, fits = start.footprints.tolist(), start.excess_bytes == 0.0
    for index, actions in enumerate(start.actions):
        kept, _, recompute_s, _ = footprints[index]
        most_kept, most_s = kept + spare[index], recompute_s + waits
        for other in problem.others(index, actions):
            found = other.footprint
            if not fits or (found.recompute_s < most_s and found.kept_bytes <= most_kept):
                changes.append({index: other})
    return changes


def _scores(problem: Problem, start: Candidate, changes: Sequence[_Changes]) -> tuple[Array, Array]:
    """Return overhead seconds and excess bytes after each of these changes."""
    parts = []
    at_once = max(_AT_ONCE // len(start.actions), 1)
    for first in range(0, len(changes), at_once):
        some = changes[first : first + at_once]
        footprints = numpy.repeat(start.footprints[None], len(some), axis=0)
        for number, change in enumerate(some):
            for index, choice in change.items():
                footprints[number, index] = choice.footprint[:4]
        schedule = evaluate(problem, footprints)
        parts.append((schedule.overhead_s, schedule.excess_bytes))
    return numpy.concatenate([part[0] for part in parts]), numpy.concatenate([part[1] for part in parts])


def _changed(problem: Problem, start: Candidate, changes: _Changes) -> Candidate:
    actions = [changes[index].actions if index in changes else each for index, each in enumerate(start.actions)]
    found = candidate(problem, actions)
    assert found is not None
    return found


def _as_many(problem: Problem, start: Candidate, places: Iterable[tuple[int, int]], action: Action) -> Candidate:
    """Give an action to values, in their order, passing over those where it costs time or room."""
    left = [(index, position) for index, position in places if action in problem.allowed[index][position]]
    for _ in range(_MOST_ROUNDS):
        alone = [(place, next(_growing(problem, start, [place], action), None)) for place in left]
        singles = [(place, changes) for place, changes in alone if changes is not None]
        free = _free(problem, start, [changes for _, changes in singles])
        left = [place for (place, _), good in zip(singles, free, strict=True) if good]
        if not left:
            break
        more = list(_growing(problem, start, left, action))
        free = _free(problem, start, more)
        number = free.index(False) if False in free else len(free)
        start = _changed(problem, start, more[number - 1])
        left = left[number:]
    return start


def _growing(
    problem: Problem, start: Candidate, places: Sequence[tuple[int, int]], action: Action
) -> Iterator[_Changes]:
    """Yield the change that gives an action to the first value, to the first two, and so on, while backward has all."""
    changes: dict[int, Choice] = {}
    for index, position in places:
        actions = changes[index].actions if index in changes else start.actions[index]
        actions = (*actions[:position], action, *actions[position + 1 :])
        footprint = problem.footprint(index, actions)
        if footprint is None:
            return
        changes[index] = Choice(actions, footprint)
        yield dict(changes)


def _free(problem: Problem, start: Candidate, changes: Sequence[_Changes]) -> list[bool]:
    """Return which changes cost neither time nor room."""
    if not changes:
        return []
    overhead_s, excess = _scores(problem, start, changes)
    good: list[bool] = (
        (excess <= start.excess_bytes) & (overhead_s <= start.overhead_s + _ROUNDING * problem.scale_s)
    ).tolist()
    return good
