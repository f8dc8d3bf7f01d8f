"""Which tensors `PREFER_OFFLOAD` keeps after all: those whose moving made the previous step wait.

NOTE [ Demotion ]

Rule 1. A step has one plan, fixed when it begins: what is moved does not depend on how the machine felt in the
        middle of it. Within a step only a put that finds no room demotes (`put(..., must=False)` answers why).
Rule 2. The plan follows from the measured stalls of the previous step. The first two steps teach the order of
        backward and grow the pool, so they demote nothing.
Rule 3. Copies share one link, so a late tensor is often late because of others. Each step therefore demotes
        only the worst, those that make up half of the stall, and the next step measures again. A stall of less
        than a hundredth of the step is not worth the memory.
Rule 4. A demoted tensor stays demoted until settings change: plans settle, they do not swing.
Rule 5. A place of the program (a module, or a line that opens regions) has steps of its own. A step is over when
        a backward reads what it moved or kept, or when such a region is gone; what the place moves next belongs to
        the next step, and is told from others by how many regions the place opened in that step before.
Rule 6. What is read first in a backward cannot have been read ahead, and is late. Where it is kept instead,
        reading it begins to read ahead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Protocol

from actckpt import config

__all__ = ["RegionPlan", "StepPlan", "Steps", "Timing"]

_NUM_LEARNING_STEPS = 2
#: Of the time of a step.
_NEGLIGIBLE = 0.01
#: Bounds memory where shapes never repeat, or nothing ever runs backward.
_MAX_PLACES = 1 << 16


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
    """What one step moves. Several threads may use it."""

    def __init__(self, kept: frozenset[Hashable], step: int) -> None:
        self.kept = kept
        self.step = step
        self._began = time.perf_counter()
        self._timings: dict[Hashable, Timing] = {}

    def moved(self, place: Hashable, timing: Timing) -> None:
        """Note that what is saved at `place` was moved: its stalls count for the next step."""
        if len(self._timings) < _MAX_PLACES:
            self._timings[place] = timing

    def next(self) -> StepPlan:
        """Return the plan of the next step, from what is measured so far."""
        if self.step + 1 < _NUM_LEARNING_STEPS:
            return StepPlan(self.kept, self.step + 1)
        stalls = {place: timing.stall_seconds for place, timing in self._timings.items() if timing.is_late}
        total = sum(stalls.values())
        if total < _NEGLIGIBLE * (time.perf_counter() - self._began):
            return StepPlan(self.kept, self.step + 1)
        excess = total / 2
        demoted = set(self.kept) if len(self.kept) < _MAX_PLACES else set()
        for place in sorted(stalls, key=lambda place: -stalls[place]):
            if excess <= 0:
                break
            excess -= stalls[place]
            demoted.add(place)
        return StepPlan(frozenset(demoted), self.step + 1)


class RegionPlan:
    """The part of a step's plan that concerns one region."""

    __slots__ = ("_ordinal", "_plan", "_steps")

    def __init__(self, steps: Steps, plan: StepPlan, ordinal: int) -> None:
        self._steps = steps
        self._plan = plan
        self._ordinal = ordinal

    def wants(self, place: Hashable) -> bool:
        """Whether the tensor that the region saves at `place` (what tells it from its others) is moved."""
        return (self._ordinal, place) not in self._plan.kept

    def moved(self, place: Hashable, timing: Timing) -> None:
        """Note that it was moved."""
        self._plan.moved((self._ordinal, place), timing)

    def read(self) -> None:
        """Note that a backward reads what was moved, or kept by the plan (Rule 5)."""
        self._steps.end(self._plan)

    def __del__(self) -> None:
        self._steps.end(self._plan)


class Steps:
    """The steps of one place of the program (Rule 5)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: StepPlan | None = None
        self._generation = config.generation  # of the settings that the plan was learnt with
        self._is_over = False
        self._num_regions = 0

    def region(self) -> RegionPlan:
        """Begin a region that moves something, and a step if the last one is over."""
        with self._lock:
            if self._plan is None or self._generation != config.generation:
                self._plan = StepPlan(frozenset(), 0)
                self._generation = config.generation
                self._num_regions = 0
            elif self._is_over:
                self._plan = self._plan.next()
                self._num_regions = 0
            self._is_over = False
            self._num_regions += 1
            return RegionPlan(self, self._plan, self._num_regions - 1)

    def end(self, plan: StepPlan) -> None:
        """End the step of `plan`, if it is still under way."""
        if plan is self._plan:
            self._is_over = True
