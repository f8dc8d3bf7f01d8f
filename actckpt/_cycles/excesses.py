"""Cycles of one kind that needed more than the budget although no meter counted them."""

from __future__ import annotations

import torch

from actckpt._core import devices
from actckpt._core.sites import warn_user
from actckpt._cycles.warnings import EXCEEDS
from actckpt._text.sizes import format_bytes
from actckpt.planner.plans import Plan

__all__ = ["Excesses"]

#: So often a plan is corrected after such a cycle.
_MOST = 16
#: What a plan that exceeds the budget is known to need may differ by this share.
_TOLERANCE = 0.01


class Excesses:
    """Counts them.

    Args:
        model: type of the model, and `budget` as the user wrote it: for the warning.
    """

    def __init__(self, model: str, budget: str) -> None:
        self._model, self._budget = model, budget
        self._num, self._is_told = 0, False

    def correct(self, risen_bytes: float, plan: Plan | None, is_refused: bool) -> bool:
        """Return whether the plan is corrected for a cycle with this peak. Warns once where that did not help.

        Args:
            is_refused: the plan is known to exceed the budget.
        """
        if plan is None:
            return False
        known_bytes = (1 + _TOLERANCE) * plan.peak_bytes if is_refused else plan.budget_bytes
        if risen_bytes <= known_bytes or self._num > _MOST:
            return False
        self._num += 1
        if self._num > _MOST:
            self._warn(risen_bytes)
            return False
        return True

    def stay(self, peak_bytes: float, device: torch.device) -> None:
        """The best plan still exceeds the budget. On a CPU no later cycle tells that, so warn."""
        if devices.counting(device) is None:
            self._warn(peak_bytes)

    def _warn(self, peak_bytes: float) -> None:
        if not self._is_told:
            self._is_told = True
            warn_user(EXCEEDS.format(self._model, self._budget, format_bytes(peak_bytes)))
