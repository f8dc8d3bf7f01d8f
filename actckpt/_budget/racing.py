"""Plans and simple choices, run against each other: the fastest that fits."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Protocol

from actckpt._budget.running import Candidate
from actckpt.planner.plans import Plan, Raced

__all__ = ["Trials", "race_plans"]

_PLAN = "plan"
#: What is predicted to need more than this share of the budget is not run; predictions may be some percent too high.
_TRIED = 1.1
_ROUNDS = 5
#: After so many rounds, what is slower than the fastest by more than this leaves the race.
_EARLY_ROUNDS, _EARLY_RATIO = 2, 1.25


class Trials(Protocol):
    """Runs plans."""

    def candidate(self, name: str, plan: Plan) -> Candidate:
        """Return a plan as a way to run the step."""

    def peak_of(self, plan: Plan) -> float:
        """Run a plan and return its peak, in bytes."""


def race_plans(plan: Plan, others: Iterable[tuple[str, Plan]], trials: Trials) -> Plan:
    """Run a plan against others that fit into its budget, in turns; return the fastest, which knows the race."""
    entries = [(_PLAN, plan, plan.peak_bytes)]
    rows: dict[str, Raced] = {}
    for name, other in others:
        if _is_same(other, plan):
            continue
        # Far above the budget, running it is what the budget is to prevent.
        peak = trials.peak_of(other) if other.peak_bytes <= _TRIED * plan.budget_bytes else other.peak_bytes
        rows[name] = Raced(name, peak, fits=peak <= plan.budget_bytes)
        if rows[name].fits:
            bound = min(plan.bound_seconds, other.overhead_seconds)
            alike = dataclasses.replace(other, peak_bytes=peak, budget_bytes=plan.budget_bytes, bound_seconds=bound)
            entries.append((name, alike, peak))
    if len(entries) == 1:
        return dataclasses.replace(plan, race=tuple(rows.values()))
    left = [(trials.candidate(name, each), each) for name, each, _ in entries]
    finished = dict(_timed(left))
    reference = statistics.median(finished[_PLAN][0].seconds)
    for name, (candidate, each) in finished.items():
        seconds = statistics.median(candidate.seconds)
        rows[name] = Raced(name, each.peak_bytes, fits=True, seconds=seconds, ratio=seconds / reference)
    names = [name for name, (candidate, _) in finished.items() if len(candidate.seconds) == _ROUNDS]
    best = min(names, key=lambda name: rows[name].seconds or 0.0)
    return dataclasses.replace(finished[best][1], race=tuple(rows.values()), chosen=best)


def _is_same(plan: Plan, other: Plan) -> bool:
    return plan.actions == other.actions and plan.rerun == other.rerun


def _timed(entries: list[tuple[Candidate, Plan]]) -> Iterable[tuple[str, tuple[Candidate, Plan]]]:
    for candidate, _ in entries:
        candidate.run()  # warm up
    running = list(entries)
    for number in range(_ROUNDS):
        for candidate, _ in running:
            candidate.time()
        if number + 1 == _EARLY_ROUNDS:
            best = min(min(candidate.seconds) for candidate, _ in running)
            running = [each for each in running if min(each[0].seconds) <= _EARLY_RATIO * best]
    return [(candidate.name, (candidate, plan)) for candidate, plan in entries]
