"""Budgets to the byte: at, one byte below and one byte above what a plan needs, for tables of any size."""

import copy
import math
import random

import brute_force
import numpy
import pytest
from brute_force import Table

from actckpt.planner import PlanInfeasibleError, simulate, solve

_SIZES = {"bytes", "working_set_bytes", "gradient_bytes", "recompute_bytes", "rerun_bytes", "fixed_bytes", "host_bytes"}
#: Seconds may differ by this share of the step.
_CLOSE = 1e-6


def _scaled(table: Table, scale: int, rng: random.Random | None) -> Table:
    """Return a table with more bytes, and links as much faster; `rng` makes bytes uneven: few sums are equal then."""

    def change(part: Table) -> None:
        for key in part.keys() & _SIZES:
            part[key] = part[key] * scale + (rng.randint(-2, 2) if rng and part[key] else 0)

    table = copy.deepcopy(table)
    change(table)
    for key in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
        table[key] *= scale
    for block in table["classes"].values():
        change(block)
        for value in block.get("values", []):
            change(value)
    return table


def _check(table: Table, budget: int, best_s: float, least_bytes: float, what: str) -> None:
    """Check that the plan for a budget fits and is the fastest, and that there is one if any plan fits."""
    blocks = [table["classes"][name] for name in table["stack"]]
    step_s = sum(block["forward_s"] + block["backward_s"] for block in blocks)
    try:
        plan = solve(table, budget=budget)
    except PlanInfeasibleError as error:
        assert math.isinf(best_s) and error.smallest_bytes == least_bytes, what
        return
    step = simulate(table, plan)
    assert step.fits and step.peak_bytes <= budget, what
    assert plan.overhead_seconds == pytest.approx(best_s, abs=_CLOSE * step_s), what


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("scale", [1, 10**3, 10**6, 10**9, 10**12])
def test_plans_are_the_best_to_the_byte(scale: int, uneven: bool) -> None:
    for seed in range(25):
        rng = random.Random(f"{seed} {scale} {uneven}")
        table = _scaled(brute_force.random_table(rng.randrange(10**5)), scale, rng if uneven and scale > 9 else None)
        plans, needed = brute_force.all_triples(table), brute_force.needed_bytes(table)
        peaks = numpy.unique(needed[numpy.isfinite(needed)])
        if not peaks.size:
            continue
        peak = int(rng.choice([peaks.min(), *peaks]))
        for budget in (peak - 1, peak, peak + 1):
            best_s = float(brute_force.overheads(table, budget, plans).min(initial=numpy.inf))
            _check(table, budget, best_s, peaks.min(), f"seed {seed}, {budget - peak} bytes more than {peak}")


def test_a_budget_that_a_plan_fills_to_the_byte() -> None:
    """A search over rounded coefficients ended with a plan of 4 s here."""
    table = _scaled(brute_force.random_table(429), 10**9, None)
    plan = solve(table, budget=8 * 10**9)
    assert plan.overhead_seconds == plan.bound_seconds == pytest.approx(3.0) and plan.peak_bytes == 8 * 10**9
