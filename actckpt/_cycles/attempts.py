"""Plans of one kind of cycle that ran under a meter since the model was measured, or had to be corrected."""

from __future__ import annotations

import dataclasses

from actckpt.planner.plans import Plan

__all__ = ["Attempt", "Attempts"]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A plan that ran under a meter."""

    plan: Plan
    peak_bytes: float


class Attempts:
    """Remembers them.

    Attributes:
        num_rounds: how many ran since `start_again`.
    """

    def __init__(self) -> None:
        self._all: list[Attempt] = []
        self.num_rounds = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, plan: Plan, peak_bytes: float) -> None:
        """A plan ran."""
        self._all.append(Attempt(plan, peak_bytes))
        self.num_rounds += 1

    def start_again(self) -> None:
        """Count rounds anew: plans are of another sort from now on."""
        self.num_rounds = 0

    def has(self, plan: Plan) -> bool:
        """Return whether a plan with the same actions ran."""
        return any((each.plan.actions, each.plan.rerun) == (plan.actions, plan.rerun) for each in self._all)

    def best(self, budget_bytes: float) -> Attempt:
        """Return the fastest one that fits; where none does, the one that needs least."""
        fitting = [each for each in self._all if each.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda each: each.plan.overhead_seconds)
        return min(self._all, key=lambda each: each.peak_bytes)
