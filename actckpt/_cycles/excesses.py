"""Unmetered cycles of one kind that exceeded the budget."""

from __future__ import annotations

import torch

from actckpt._budget.infeasible import Infeasible
from actckpt._core import devices
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
        infeasible: the warnings of all kinds of cycles of the model.
    """

    def __init__(self, model: str, budget: str, infeasible: Infeasible) -> None:
        self._model, self._budget, self._infeasible = model, budget, infeasible
        self._num = 0

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
        self._infeasible.warn_of_excess(self._model, self._budget, peak_bytes)
