"""Trials: training cycles that run candidate plans in turn until the fastest one is known.

All plans give the same bits, so trials are training steps like any other. They run in rounds, one cycle of each
candidate per round. A candidate is eliminated if it is slower than the best one by more than the spread of the paired
differences; one that is predicted to be faster only after more rounds. If no difference exceeds the spread in the end,
the prediction decides: other programs may slow down some cycles by large factors.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import torch

from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.fake_collectives import num_ranks
from actckpt._budget.simple import probe_of, simple_plans
from actckpt._core import devices
from actckpt._core.devices import Moment
from actckpt.planner.plans import Plan, Raced

__all__ = ["Candidate", "Trials", "trials_of"]

#: Number of rounds before a candidate may be eliminated, before that may contradict the prediction, and of all rounds.
_FEWEST_ROUNDS, _CONTRADICTING_ROUNDS, _MOST_ROUNDS = 3, 6, 12
#: Resolution of device events.
_RESOLUTION_S = 5e-7
#: After the first round, a candidate this many times slower is eliminated at once, if that was predicted.
_MUCH_SLOWER = 1.5


@dataclasses.dataclass
class Candidate:
    """A candidate plan.

    Args:
        name: for people.
        peak_bytes: predicted, or measured once it ran under a meter.
    """

    name: str
    plan: Plan
    peak_bytes: float
    #: Whether its peak was measured.
    is_measured: bool = False
    fits: bool = True
    #: A plan that runs first and shows whether this one fits.
    probe: Plan | None = None
    cycles: list[tuple[Moment, Moment]] = dataclasses.field(default_factory=list)

    def seconds(self) -> list[float]:
        return [max(devices.seconds_between(*cycle), _RESOLUTION_S) for cycle in self.cycles]


def trials_of(plan: Plan, budget_bytes: float, placed: Callable[[Plan], Plan], config: BudgetConfig) -> Trials | None:
    """Return trials of a measured plan and of simple policies; None if only one plan fits, or trials are off.

    Args:
        budget_bytes: maximum peak of a candidate.
        placed: returns a plan with the places of its values in the model.
    """
    if not config.race or config.pins or num_ranks() > 1:  # several ranks would have to run them in step
        return None
    fits = plan.peak_bytes <= budget_bytes
    candidates = [Candidate("plan", plan, plan.peak_bytes, is_measured=True, fits=fits)]
    for name, other in simple_plans(plan.costs):
        if (other.actions, other.rerun) not in [(each.plan.actions, each.plan.rerun) for each in candidates]:
            of_budget = placed(dataclasses.replace(other, budget_bytes=plan.budget_bytes))
            fits = other.peak_bytes <= budget_bytes
            probe = None if fits else probe_of(of_budget)
            candidates.append(Candidate(name, of_budget, other.peak_bytes, fits=fits, probe=probe))
    num_tried = sum(candidate.fits or candidate.probe is not None for candidate in candidates)
    return Trials(candidates, budget_bytes) if num_tried > 1 else None


class Trials:
    """Candidates and their cycles.

    Args:
        candidates: the solver's plan first; its peak is known. Those predicted not to fit, and without probe, are only
            listed.
        budget_bytes: maximum measured peak of a candidate.

    Attributes:
        running: the candidate of this cycle.
    """

    def __init__(self, candidates: list[Candidate], budget_bytes: float) -> None:
        self._all, self._budget_bytes = candidates, budget_bytes
        self._left = [candidate for candidate in candidates if candidate.fits or candidate.probe is not None]
        self.running = candidates[0]

    @property
    def is_over(self) -> bool:
        """Whether at most one candidate, with a measured peak, is left."""
        return len(self._left) <= 1 and all(candidate.is_measured for candidate in self._left)

    @property
    def num_cycles_left(self) -> int:
        return 0 if self.is_over else sum(_MOST_ROUNDS - len(candidate.cycles) for candidate in self._left)

    def next(self) -> Candidate:
        """Return the candidate for the next cycle: an unmeasured one, else the one with the fewest cycles."""
        unmeasured = [candidate for candidate in self._left if not candidate.is_measured]
        self.running = unmeasured[0] if unmeasured else min(self._left, key=lambda candidate: len(candidate.cycles))
        return self.running

    def note_probe(self, peak_bytes: float) -> None:
        """A metered cycle of the candidate's probe has ended: it predicts this peak for the candidate."""
        self.running.probe, self.running.peak_bytes = None, peak_bytes
        self._drop_unless_fits()

    def note_peak(self, peak_bytes: float) -> None:
        """A metered cycle of the candidate has ended; it is not timed."""
        self.running.is_measured, self.running.peak_bytes = True, peak_bytes
        self._drop_unless_fits()

    def _drop_unless_fits(self) -> None:
        self.running.fits = self.running.peak_bytes <= self._budget_bytes
        if not self.running.fits:
            self._left.remove(self.running)

    def note_time(self, began: Moment, device: torch.device) -> None:
        """An unmetered cycle of the candidate has ended."""
        if self.running.probe is not None:
            return
        self.running.cycles.append((began, devices.moment(device)))
        if len({len(candidate.cycles) for candidate in self._left}) == 1 and self._have_passed():
            self._drop_slower()

    def _have_passed(self) -> bool:
        return all(devices.has_passed(end) for candidate in self._left for _, end in candidate.cycles)

    def _drop_slower(self) -> None:
        times = {id(candidate): candidate.seconds() for candidate in self._left}
        num_rounds = len(self._left[0].cycles)
        best = min(self._left, key=lambda candidate: statistics.median(times[id(candidate)]))
        reference = times[id(best)]

        def is_slower(candidate: Candidate) -> bool:
            seconds = times[id(candidate)]
            if candidate.plan.overhead_seconds < best.plan.overhead_seconds and num_rounds < _CONTRADICTING_ROUNDS:
                return False
            if num_rounds < _FEWEST_ROUNDS:
                return min(seconds) > _MUCH_SLOWER * min(reference)
            ratios = [mine / other - 1 for mine, other in zip(seconds, reference, strict=True)]
            return statistics.mean(ratios) > 2 * statistics.stdev(ratios) / math.sqrt(num_rounds)

        self._left = [candidate for candidate in self._left if candidate is best or not is_slower(candidate)]
        if num_rounds >= _MOST_ROUNDS:
            self._left = [min(self._left, key=lambda other: (other.plan.overhead_seconds, other is not best))]

    def result(self) -> Plan:
        """Return the fastest plan, or the solver's if none fits, with the measurements of all of them."""
        best = self._left[0] if self._left else self._all[0]
        reference = statistics.median(self._all[0].seconds()) if self._all[0].cycles else None
        rows = tuple(self._row(candidate, reference) for candidate in self._all)
        return dataclasses.replace(best.plan, peak_bytes=best.peak_bytes, race=rows, chosen=best.name)

    @staticmethod
    def _row(candidate: Candidate, reference_s: float | None) -> Raced:
        seconds = statistics.median(candidate.seconds()) if candidate.cycles else None
        ratio = None if seconds is None or reference_s is None else seconds / reference_s
        return Raced(candidate.name, candidate.peak_bytes, candidate.fits, seconds, ratio)
