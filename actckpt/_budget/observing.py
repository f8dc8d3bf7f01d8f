"""What steps under a plan really needed, by the allocator of a device, and what that changes in the plan.

NOTE [ Observed peaks ]

Rule 1. The allocator's peak since the program last started it again is read, never started again, and nothing waits for
        the device. Where it rose between two moments of a step, it is the peak between them; where it did not, nothing
        is known.
Rule 2. It is read where a forward begins, where backward reaches the output of the last block, and where it ends. What
        rises up to the former is put down to the head, with which the loss counts; what rises later to blocks and stem.
        Steps in which several forwards are alive tell nothing.
Rule 3. Where the peak exceeds the budget, or the prediction by more than a tenth of what is not fixed, working sets are
        enlarged so that the prediction would have been right, and the plan is made again; once in a hundred steps.
Rule 4. What is fixed may have grown before the step began: that is no part of working sets.
Rule 5. What the head needs may be in doubt (NOTE [ The first backward ]). Then plans are made for the most that it may
        be, where one fits, and again as soon as the peak tells that it is less, which happens once. Of blocks and stem
        it tells nothing then: what they need more than predicted, as long as it is within Rule 3, is in the reserve.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from actckpt._blocks.arguments import first_tensor
from actckpt._budget.class_names import AFTER
from actckpt._budget.pace import Pace
from actckpt._core import devices
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["Observing"]

_SHARE = 0.1
#: What the head needs less than at most is worth another plan from this share of what is not fixed.
_ROOM = 0.02
#: More bytes than any machine has; sums with it are exact.
_HUGE = 2.0**50


class Observing:
    """Reads the peaks of steps (NOTE [ Observed peaks ]); on a CPU, which has no allocator to ask, it does nothing."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._pace = pace
        self._device, self._allocator = device, devices.counting(device)
        self._plan: Plan | None = None
        self._last_bytes = 0
        #: By whether the head needed it.
        self._seen: dict[bool, int] = {}
        self._more = {True: 0.0, False: 0.0}
        self._found: tuple[Plan, dict[bool, float]] | None = None
        self._grown_bytes, self._is_smaller = 0.0, False
        self._hook: RemovableHandle | None = None
        #: Of the head, beyond what it is taken to need.
        self.doubt_bytes = 0.0

    def watch(self, last: torch.nn.Module) -> None:
        """Notice where backward reaches the output of the last block, in steps that begin from now on."""
        if self._hook is None and self._allocator is not None:
            self._hook = last.register_forward_hook(self._last_ran)

    def close(self) -> None:
        """Notice it no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _last_ran(self, _: torch.nn.Module, __: Any, result: Any) -> None:
        output = first_tensor(result) if self._plan is not None else None
        if output is not None and output.requires_grad:
            output.register_hook(self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        self.note(is_head=True)

    @property
    def wants_plan(self) -> bool:
        """Whether the plan must be made again."""
        return self._found is not None

    @property
    def has_corrected(self) -> bool:
        """Whether working sets were enlarged."""
        return any(more > 0.0 for more in self._more.values())

    def begin(self, plan: Plan, *, is_alone: bool, is_smaller: bool, grown_bytes: float) -> None:
        """A forward begins under a plan.

        Args:
            is_smaller: it is of a smaller size than that, so that less than was predicted tells nothing.
            grown_bytes: by so much has grown what is fixed since the plan was made.
        """
        self._grown_bytes, self._is_smaller = grown_bytes, is_smaller
        self._plan = plan if is_alone and self._allocator is not None else None
        self._seen = {}
        if self._allocator is not None:
            self._last_bytes = self._allocator.peak_bytes(self._device)

    def give_up(self) -> None:
        """The step that runs does not count."""
        self._plan = None

    def note(self, *, is_head: bool) -> None:
        """Backward has reached the outputs of the model, or of the last block in it, or has ended."""
        if self._plan is None or self._allocator is None:
            return
        peak_bytes = self._allocator.peak_bytes(self._device)
        if peak_bytes != self._last_bytes:  # it may also have been started again, and then be less
            self._seen[is_head], self._last_bytes = peak_bytes, peak_bytes

    def ended(self, budget_bytes: float) -> None:
        """Backward has ended."""
        self.note(is_head=False)
        plan, self._plan = self._plan, None
        if plan is None or not self._pace.is_due or not self._seen:
            return
        peak_bytes = max(self._seen.values())
        allowed = plan.peak_bytes + _SHARE * (plan.peak_bytes - plan.costs.fixed_bytes)
        is_more = peak_bytes > min(budget_bytes, allowed)
        if is_more or self._has_room(plan):
            # By less, it is what plans leave for what is not seen.
            seen = self._seen if is_more else {True: self._seen[True]}
            self._found = plan, {is_head: peak - self._grown_bytes for is_head, peak in seen.items()}
            if is_more:
                self._pace.use()

    def _has_room(self, plan: Plan) -> bool:
        """Return whether the head needs clearly less than it was taken to need at most (Rule 5)."""
        if self._is_smaller or not self.doubt_bytes or True not in self._seen:
            return False
        return _needed(plan, is_head=True) - self._seen[True] > _ROOM * (plan.peak_bytes - plan.costs.fixed_bytes)

    def corrected(self, costs: CostTable) -> list[CostTable]:
        """Return the costs of a step with working sets as they were observed, the most careful first."""
        if self._found is not None:
            (plan, seen), self._found = self._found, None
            off = {is_head: peak - _needed(plan, is_head=is_head) for is_head, peak in seen.items()}
            self._more[False] += max(off.get(False, 0.0), 0.0)
            if True in off and (off[True] > 0.0 or self.doubt_bytes):
                taken = plan.costs.classes[AFTER].working_set_bytes - costs.classes[AFTER].working_set_bytes
                self._more[True], self.doubt_bytes = taken + off[True], 0.0
        found = _with_more(costs, self._more) if any(self._more.values()) else costs
        doubted = _with_more(found, {True: self.doubt_bytes, False: 0.0})
        return [doubted, found] if self.doubt_bytes else [found]


def _needed(plan: Plan, *, is_head: bool) -> float:
    """Return the bytes that a step of a plan was predicted to need at most in the head, or outside of it."""
    from actckpt.planner.simulation import simulate

    return simulate(_with_more(plan.costs, {is_head: _HUGE, not is_head: 0.0}), plan).peak_bytes - _HUGE


def _with_more(costs: CostTable, more: dict[bool, float]) -> CostTable:
    classes = {
        name: dataclasses.replace(block, working_set_bytes=max(block.working_set_bytes + more[name == AFTER], 0.0))
        for name, block in costs.classes.items()
    }
    return dataclasses.replace(costs, classes=classes)
