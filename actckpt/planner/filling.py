"""What is left of the budget, filled with what saves most seconds per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy

from actckpt.action import Action
from actckpt.planner.problem import Actions, Choice, Problem, droppable, seconds_of

__all__ = ["filled"]


class _Move(NamedTuple):
    """Something of an entry that is kept, where it was not; None: all of it, where it was run again."""

    entry: int
    position: int | None
    #: Seconds saved per byte.
    worth: float


def filled(problem: Problem, choice: Choice) -> list[Choice]:
    """Return choices each of which keeps something more than the one before, none slower, as far as they fit.

    They start from one that fits. Most is saved first; of what saves as little, what is kept for a short time.
    """
    filling = _Filling(problem, choice)
    moves = [move for index in range(len(choice.actions)) for move in filling.moves(index)]
    found: list[Choice] = []
    for move in sorted(moves, key=lambda move: (-move.worth, -move.entry)):
        if filling.make(move):
            found.append(filling.choice)
    return found


class _Filling:
    """A choice that fits, and the room that it leaves in each segment."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem, self.choice = problem, choice
        segments = [moment.segment for moment in problem.moments]
        self._room = problem.budget_bytes - problem.needs(choice)
        self._alive = [numpy.array([index in s.alive for s in segments]) for index in range(len(choice.actions))]
        self._own = [
            [number for number, s in enumerate(segments) if s.running == index] for index in range(len(choice.actions))
        ]

    def moves(self, index: int) -> Iterator[_Move]:
        """Yield what may be kept of an entry, and costs no time."""
        actions, rerun = self.choice.actions[index], self.choice.rerun[index]
        block = self.problem.costs.blocks[index]
        positions = [None] if rerun else [at for at, action in enumerate(actions) if action is not Action.KEEP]
        before = seconds_of(block, actions, rerun)
        for position in positions:
            after, again = self._after(index, position)
            if after is None or before is None:
                continue
            seconds = seconds_of(block, after, again)
            if seconds is not None and seconds <= before:
                nbytes = self._kept(index, after) - self._kept(index, actions)
                yield _Move(index, position, (before - seconds) / nbytes if nbytes > 0 else math.inf)

    def _after(self, index: int, position: int | None) -> tuple[Actions | None, bool]:
        """Return the actions of an entry that keeps something more, None where it may not, and whether it is rerun."""
        block, allowed, actions = (
            self.problem.costs.blocks[index],
            self.problem.allowed[index],
            self.choice.actions[index],
        )
        if position is not None:
            value = block.values[position]
            is_useful = value.needed or any(value.name in other.inputs for other in block.values)
            if not is_useful or Action.KEEP not in allowed[position]:
                return None, False
            return (*actions[:position], Action.KEEP, *actions[position + 1 :]), self.choice.rerun[index]
        kept = {at for at in droppable(block, allowed) if block.values[at].needed and Action.KEEP in allowed[at]}
        return tuple(Action.KEEP if at in kept else action for at, action in enumerate(actions)), False

    def make(self, move: _Move) -> bool:
        """Keep something more, if there is room for it and it costs no time."""
        index, (after, again) = move.entry, self._after(move.entry, move.position)
        block, actions, rerun = self.problem.costs.blocks[index], self.choice.actions[index], self.choice.rerun[index]
        if after is None or (before_s := seconds_of(block, actions, rerun)) is None:
            return False
        after_s = seconds_of(block, after, again)
        if after_s is None or after_s > before_s:
            return False
        if move.position is not None and not block.values[move.position].needed and after_s == before_s:
            return False
        less = self._room - self._alive[index] * (self._kept(index, after) - self._kept(index, actions))
        for number in self._own[index]:
            less[number] -= self._own_bytes(number, after, again) - self._own_bytes(number, actions, rerun)
        if (less < numpy.minimum(self._room, 0.0)).any():
            return False
        self._room, self.choice = less, self.choice.changed(index, after, again)
        return True

    def _kept(self, index: int, actions: Actions) -> float:
        pairs = zip(self.problem.costs.blocks[index].values, actions, strict=True)
        return sum(value.nbytes for value, action in pairs if action is Action.KEEP)

    def _own_bytes(self, number: int, actions: Actions, rerun: bool) -> float:
        """Return what an entry needs in a segment of its own."""
        segment = self.problem.moments[number].segment
        block = self.problem.costs.blocks[segment.running]
        nbytes = segment.bases[2 if rerun else int(block.is_recorded(actions))]
        if segment.is_forward:
            gone = sum(v.nbytes for v, a in zip(block.values, actions, strict=True) if a is Action.OFFLOAD)
            nbytes += min(self._kept(segment.running, actions) + gone, segment.kept_limit_bytes)
        return nbytes
