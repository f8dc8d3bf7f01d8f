"""How long steps under a plan really waited for copies, and what that changes in the plan.

NOTE [ Observed stalls ]

Rule 1. Stores count how long callers and streams wait for copies. What they count from where a forward begins until its
        backward has ended are the stalls of that step. Steps in which several forwards are alive, and those in which
        plans take turns, tell nothing.
Rule 2. The first steps of a plan are slower than others. Of those that follow several count together: a device tells
        later how long it waited, and a busy machine makes single steps wait.
Rule 3. Where they waited longer than predicted, by more than a tenth of the step that was predicted, copies are taken
        to be slower, in both directions, by the factor with which the simulator finds the stalls that were observed.
        The plan is made again with that; once in a hundred steps. Copies that are faster than they were measured change
        nothing: they were measured with nothing else running.
"""

from __future__ import annotations

import dataclasses

import torch

from actckpt._budget.pace import Pace
from actckpt._offload import stores
from actckpt.action import Action
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["Stalls"]

_SHARE = 0.1
#: Steps of a plan that do not count, and then as many as count together.
_FIRST_STEPS, _NUM_STEPS = 2, 8
#: Copies are taken to be slower by one of these factors, as a power of two.
_MOST_HALVINGS, _PARTS = 8, 8
_RATES = ("d2h_bytes_per_s", "h2d_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")


class Stalls:
    """Sums up how long steps of a plan wait for copies (NOTE [ Observed stalls ])."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._plan: Plan | None = None
        self._offloads = False
        self._num_steps, self._waited_s = 0, 0.0
        #: Of the store, when the step began; None: the step does not count.
        self._began_s: float | None = None
        self._found: tuple[Plan, float] | None = None
        #: What is left of the speed of copies.
        self._factor = 1.0

    @property
    def wants_plan(self) -> bool:
        """Whether the plan must be made again."""
        return self._found is not None

    def begin(self, plan: Plan, *, counts: bool) -> None:
        """A forward begins under a plan.

        Args:
            counts: it is alone, and plans do not take turns.
        """
        if plan is not self._plan:
            self._plan, self._num_steps, self._waited_s = plan, -_FIRST_STEPS, 0.0
            self._offloads = any(action is Action.OFFLOAD for each in plan.actions for action in each.values())
        self._began_s = self._stall_seconds() if counts and self._offloads else None

    def give_up(self) -> None:
        """The step that runs does not count."""
        self._began_s = None

    def ended(self) -> None:
        """Backward has ended."""
        if self._began_s is None or self._plan is None:
            return
        self._num_steps += 1
        if self._num_steps > 0:
            self._waited_s += self._stall_seconds() - self._began_s
        self._began_s = None
        if self._num_steps == _NUM_STEPS:
            waited_s = self._waited_s / _NUM_STEPS
            self._num_steps, self._waited_s = 0, 0.0
            predicted_s = self._plan.write_wait_seconds + self._plan.read_wait_seconds
            if waited_s > predicted_s + _SHARE * self._plan.step_seconds and self._pace.is_due:
                self._found = self._plan, waited_s
                self._pace.use()

    def _stall_seconds(self) -> float:
        return float(stores.store_for(self._device.type).engine.stats().stall_seconds)

    def corrected(self, costs: CostTable) -> CostTable:
        """Return costs with copies as slow as they were observed to be."""
        if self._found is not None:
            (plan, waited_s), self._found = self._found, None
            self._factor *= _factor_for(plan, waited_s)
        return _slowed(costs, self._factor)


def _factor_for(plan: Plan, waited_s: float) -> float:
    """Return the factor for the speed of copies with which a step of a plan waits so long, or nearly."""
    from actckpt.planner.simulation import simulate

    factors: list[float] = [2.0 ** (-number / _PARTS) for number in range(1, _MOST_HALVINGS * _PARTS + 1)]
    waits = (abs(simulate(_slowed(plan.costs, factor), plan).wait_seconds - waited_s) for factor in factors)
    return min(zip(waits, factors, strict=True))[1]


def _slowed(costs: CostTable, factor: float) -> CostTable:
    return dataclasses.replace(costs, **{name: factor * getattr(costs, name) for name in _RATES})
