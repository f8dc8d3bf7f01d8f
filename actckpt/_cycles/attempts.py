"""Plans of one kind of cycle that ran under a meter since the model was measured or corrected."""

from __future__ import annotations

import dataclasses

from actckpt.planner.plans import Plan

__all__ = ["Attempt", "Attempts"]


@dataclasses.dataclass(frozen=True)
class Attempt:
    plan: Plan
    peak_bytes: float


class Attempts:
    """The list of attempts.

    Attributes:
        num_rounds: number of attempts since `start_again`.
    """

    def __init__(self) -> None:
        self._all: list[Attempt] = []
        self.num_rounds = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, plan: Plan, peak_bytes: float) -> None:
        self._all.append(Attempt(plan, peak_bytes))
        self.num_rounds += 1

    def start_again(self) -> None:
        """Restart the count of rounds: later plans are of another sort."""
        self.num_rounds = 0

    def has(self, plan: Plan) -> bool:
        return any((attempt.plan.actions, attempt.plan.rerun) == (plan.actions, plan.rerun) for attempt in self._all)

    def best(self, budget_bytes: float) -> Attempt:
        """Return the fastest attempt that fits, or the smallest if none fits."""
        fitting = [attempt for attempt in self._all if attempt.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda attempt: attempt.plan.overhead_seconds)
        return min(self._all, key=lambda attempt: attempt.peak_bytes)
