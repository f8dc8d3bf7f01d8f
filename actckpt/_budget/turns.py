"""Plans that take turns in the steps of a training."""

from __future__ import annotations

import dataclasses
import statistics
import time

from actckpt.planner.plans import Plan, Raced

__all__ = ["Race", "Turn"]

_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a race."""

    began_s: float
    #: Of the plan that runs in it, step by step.
    seconds: list[float]


class Race:
    """Plans that take turns in real steps."""

    def __init__(self, entries: list[tuple[str, Plan]]) -> None:
        self._entries = entries
        self._seconds: list[list[float]] = [[] for _ in entries]
        self._at = 0
        self._began_s = 0.0
        self.is_over = False

    def next(self) -> Plan:
        """Return the plan that runs next, or the one that has won."""
        if all(len(each) > _ROUNDS for each in self._seconds):
            self.is_over = True
            return self._winner()
        self._at = min(range(len(self._entries)), key=lambda at: len(self._seconds[at]))
        self._began_s = time.perf_counter()
        return self._entries[self._at][1]

    @property
    def steps_left(self) -> int:
        """How many steps it still takes."""
        return sum(max(0, _ROUNDS + 1 - len(each)) for each in self._seconds)

    def turn(self) -> Turn:
        """Return the step that runs now."""
        return Turn(self._began_s, self._seconds[self._at])

    def _winner(self) -> Plan:
        medians = [statistics.median(each[1:]) for each in self._seconds]  # the first of each warms up
        rows = tuple(
            Raced(name, plan.peak_bytes, fits=True, seconds=seconds, ratio=seconds / medians[0])
            for (name, plan), seconds in zip(self._entries, medians, strict=True)
        )
        best = min(range(len(medians)), key=medians.__getitem__)
        name, plan = self._entries[best]
        return dataclasses.replace(plan, race=rows, chosen=name)
