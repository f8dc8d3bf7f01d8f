"""Which tensors `PREFER_CPU_OFFLOAD` keeps after all: those whose moving made the previous step wait.

NOTE [ Demotion ]

Rule 1. A structure (whatever tells two steps apart: the sizes that a block moves) has one plan per step, fixed
        when the step begins: what is moved does not depend on how the machine felt in the middle of it.
        Within a step only a put that finds no room demotes (`put(..., must=False)` answers why).
Rule 2. The plan follows from the measured stalls of the previous step of that structure. The first two steps
        teach the order of backward and grow the pool, so they demote nothing.
Rule 3. Copies share one link, so a late tensor is often late because of others. Each step therefore demotes
        only the worst, those that make up half of the stall, and the next step measures again.
Rule 4. A demoted tensor stays demoted: plans settle, they do not swing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

__all__ = ["Demotions", "StepPlan", "Timing"]

_MAX_STRUCTURES = 64
_NUM_LEARNING_STEPS = 2


class Timing(Protocol):
    """How long the program waited for one ticket; `ticket.timing` outlives the ticket."""

    @property
    def stall_seconds(self) -> float:
        """Time that streams or callers waited for its copies, as far as measured."""

    @property
    def is_late(self) -> bool:
        """Whether one of those waits was longer than asking takes (50 us)."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is still to be measured."""


class StepPlan:
    """What one step of one structure moves. Several threads may use it."""

    def __init__(self, kept: frozenset[int], step: int) -> None:
        self.kept = kept
        self.step = step
        self._timings: dict[int, Timing] = {}

    def wants(self, place: int) -> bool:
        """Whether the tensor saved at `place` (a number that its structure gives it) is moved."""
        return place not in self.kept

    def moved(self, place: int, timing: Timing) -> None:
        """Note that it was moved: its stalls count for the next step."""
        self._timings[place] = timing

    def next(self) -> StepPlan:
        """Return the plan of the next step, from what is measured so far."""
        if self.step + 1 < _NUM_LEARNING_STEPS:
            return StepPlan(self.kept, self.step + 1)
        stalls = {place: timing.stall_seconds for place, timing in self._timings.items() if timing.is_late}
        excess = sum(stalls.values()) / 2
        demoted = set(self.kept)
        for place in sorted(stalls, key=lambda place: (-stalls[place], place)):
            if excess <= 0:
                break
            excess -= stalls[place]
            demoted.add(place)
        return StepPlan(frozenset(demoted), self.step + 1)


class Demotions:
    """The plans of all structures, least recently used ones forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, StepPlan] = OrderedDict()

    def begin(self, structure: Hashable) -> StepPlan:
        """Begin a step; call once per step and structure, before anything of it is saved."""
        with self._lock:
            previous = self._plans.pop(structure, None)
            plan = StepPlan(frozenset(), 0) if previous is None else previous.next()
            self._plans[structure] = plan
            while len(self._plans) > _MAX_STRUCTURES:
                self._plans.popitem(last=False)
            return plan
