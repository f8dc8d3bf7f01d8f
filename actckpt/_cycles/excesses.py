"""Unmetered cycles of one kind that exceeded the budget."""

from __future__ import annotations

import torch

from actckpt._core import devices
from actckpt._core.sites import warn_user
from actckpt._cycles.warnings import EXCEEDS
from actckpt._text.sizes import format_bytes
from actckpt.planner.plans import Plan

__all__ = ["Excesses"]

#: Maximum number of corrections of a plan after such cycles.
_MOST = 16
#: Tolerance, as a share, for plans that are known to exceed the budget.
_TOLERANCE = 0.01


class Excesses:
    """Counts cycles that exceeded the budget.

    Args:
        model: type of the model; `budget` as the user wrote it: for the warning.
    """

    def __init__(self, model: str, budget: str) -> None:
        self._model, self._budget = model, budget
        self._num, self._has_warned = 0, False

    def correct(self, risen_bytes: float, plan: Plan | None, is_refused: bool) -> bool:
        """Return whether to correct the plan after a cycle with this peak. Warns once if corrections did not help.

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
        """Warn that the best plan still exceeds the budget: on a CPU no later cycle shows that."""
        if devices.counting(device) is None:
            self._warn(peak_bytes)

    def _warn(self, peak_bytes: float) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(EXCEEDS, model=self._model, budget=self._budget, peak=format_bytes(peak_bytes))
