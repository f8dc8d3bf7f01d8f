"""What steps under a plan really needed, by the allocator of a device, and what that changes in the plan.

NOTE [ Observed peaks ]

Rule 1. The allocator's peak since the program last started it again is read, never started again, and nothing waits for
        the device. Where it rose between two moments of a step, it is the peak between them; where it did not, nothing
        is known.
Rule 2. It is read where a forward begins, where backward reaches the model's outputs, and where it ends. What rises up
        to the outputs is put down to the head, with which the loss counts; what rises later to blocks and stem.
        Steps in which several forwards are alive tell nothing.
Rule 3. Where the peak exceeds the budget, or the prediction by more than a tenth of what is not fixed, working sets are
        enlarged so that the prediction would have been right, and the plan is made again; once in a hundred steps.
Rule 4. What is fixed may have grown meanwhile: that is no part of working sets.
"""

from __future__ import annotations

import dataclasses

import torch

from actckpt._budget.measuring import HEAD
from actckpt._core import devices
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["Observing"]

_SHARE = 0.1
_STEPS_BETWEEN = 100
#: More bytes than any machine has; sums with it are exact.
_HUGE = 2.0**50


class Observing:
    """Reads the peaks of steps (NOTE [ Observed peaks ]); on a CPU, which has no allocator to ask, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._allocator = device, devices.counting(device)
        self._plan: Plan | None = None
        self._last_bytes = 0
        #: By whether the head needed it.
        self._seen: dict[bool, int] = {}
        self._more = {True: 0.0, False: 0.0}
        self._found: tuple[Plan, dict[bool, int]] | None = None
        self._num_to_wait = 0

    @property
    def wants_plan(self) -> bool:
        """Whether the plan must be made again."""
        return self._found is not None

    @property
    def has_corrected(self) -> bool:
        """Whether working sets were enlarged."""
        return any(self._more.values())

    def begin(self, plan: Plan, *, is_alone: bool) -> None:
        """A forward begins under a plan."""
        self._num_to_wait = max(self._num_to_wait - 1, 0)
        self._plan = plan if is_alone and self._allocator is not None else None
        self._seen = {}
        if self._allocator is not None:
            self._last_bytes = self._allocator.peak_bytes(self._device)

    def note(self, *, is_head: bool) -> None:
        """Backward has reached the outputs of the model, or ended."""
        if self._plan is None or self._allocator is None:
            return
        peak_bytes = self._allocator.peak_bytes(self._device)
        if peak_bytes != self._last_bytes:  # it may also have been started again, and then be less
            self._seen[is_head], self._last_bytes = peak_bytes, peak_bytes

    def ended(self, budget_bytes: float) -> None:
        """Backward has ended."""
        self.note(is_head=False)
        plan, self._plan = self._plan, None
        if plan is None or self._num_to_wait or not self._seen:
            return
        peak_bytes = max(self._seen.values())
        allowed = plan.peak_bytes + _SHARE * (plan.peak_bytes - plan.costs.fixed_bytes)
        if peak_bytes > min(budget_bytes, allowed):
            self._found = plan, self._seen

    def corrected(self, costs: CostTable) -> CostTable:
        """Return the costs of a step with working sets as they were observed."""
        if self._found is not None:
            (plan, seen), self._found = self._found, None
            growth = max(costs.fixed_bytes - plan.costs.fixed_bytes, 0.0)
            for is_head, peak_bytes in seen.items():
                self._more[is_head] += max(peak_bytes - growth - _needed(plan, is_head), 0.0)
            self._num_to_wait = _STEPS_BETWEEN
        return _with_more(costs, self._more) if self.has_corrected else costs


def _needed(plan: Plan, is_head: bool) -> float:
    """Return the bytes that a step of a plan was predicted to need at most in the head, or outside of it."""
    from actckpt.planner.simulation import simulate

    return simulate(_with_more(plan.costs, {is_head: _HUGE, not is_head: 0.0}), plan).peak_bytes - _HUGE


def _with_more(costs: CostTable, more: dict[bool, float]) -> CostTable:
    classes = {
        name: dataclasses.replace(block, working_set_bytes=block.working_set_bytes + more[name == HEAD])
        for name, block in costs.classes.items()
    }
    return dataclasses.replace(costs, classes=classes)
