"""Warnings about a model's budget: once, and again for numbers that are clearly larger."""

from __future__ import annotations

import pytest

from actckpt._cycles.warnings import Infeasible
from actckpt.errors import ActckptWarning, PlanInfeasibleError


def test_an_excess_is_told_again_for_a_larger_peak_only() -> None:
    infeasible = Infeasible("warn")
    with pytest.warns(ActckptWarning) as told:
        for peak_bytes in (1024.0, 1050.0, 2048.0, 2048.0, 1024.0):
            infeasible.warn_of_excess("Model", "budget='1 KB'", peak_bytes)
    assert [str(one.message).partition(", although")[0] for one in told] == [
        f"apply: steps of a Model with budget='1 KB' needed up to {peak}" for peak in ("1.00 KiB", "2.00 KiB")
    ]


def test_a_budget_into_which_no_plan_fits_is_told_again_for_a_larger_smallest_budget_only() -> None:
    infeasible = Infeasible("warn")
    with pytest.warns(ActckptWarning) as told:
        for smallest_bytes, is_late in ((1024, False), (1050, False), (2048, True), (1024, True)):
            infeasible.warn(PlanInfeasibleError(f"No plan fits: {smallest_bytes}.", smallest_bytes), is_late=is_late)
    first, second = (str(one.message) for one in told)
    assert "No plan fits: 1024." in first and "on_infeasible='raise'" in first
    assert "No plan fits: 2048." in second and "no plan fits any more" in second
