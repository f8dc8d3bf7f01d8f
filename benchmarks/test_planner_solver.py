"""How close are plans to what no plan can beat, and how long does it take to find them? Computed, nothing is run.

Stacks of the shape of Llama at 8192 tokens, at the assumed rates of `llama_costs.py`; memory is the share of the bytes
that backward needs of all blocks. Run with `python -m pytest benchmarks/test_planner_solver.py`; prints overhead in
percent of a step in which everything is kept. Every plan is played through by the simulator, whose overhead is shown.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import llama_costs
import pytest
import scipy
from llama_costs import Table

from actckpt.planner import CostTable, Plan, simulate, solve

_PERCENTS = (10, 20, 30, 40, 50, 60)
_SHAPES: dict[str, Callable[[], Table]] = {
    "8B, 32 blocks": llama_costs.shape_8b,
    "70B, 80 blocks": llama_costs.shape_70b,
    "three structures, 96 blocks": llama_costs.interleaved,
    "three structures, 100 blocks": lambda: llama_costs.interleaved(100),
}
_RUNS = 3


def _timed(table: Table, budget: int) -> tuple[Plan, dict[str, float]]:
    """Return a plan, and the median seconds that it took, by the clock and of processor time."""
    costs = CostTable.from_dict(table)
    clock, processor = [], []
    for _ in range(_RUNS):
        before = time.perf_counter(), time.process_time()
        plan = solve(costs, budget=budget)
        clock.append(time.perf_counter() - before[0])
        processor.append(time.process_time() - before[1])
    return plan, {"clock_s": statistics.median(clock), "processor_s": statistics.median(processor)}


@pytest.mark.parametrize("shape", _SHAPES)
def test_plans_are_near_the_bound_and_quickly_found(
    shape: str, benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _SHAPES[shape]()
    activation_bytes, plain_s = llama_costs.activation_bytes(table), llama_costs.plain_seconds(table)
    solve(table, budget=activation_bytes // 2)  # imports scipy
    rows = {}
    for percent in _PERCENTS:
        plan, times = _timed(table, activation_bytes * percent // 100)
        step = simulate(table, plan)
        assert step.fits and step.overhead_seconds == pytest.approx(plan.overhead_seconds, rel=1e-9, abs=1e-12)
        overhead, bound = (100 * seconds / plain_s for seconds in (step.overhead_seconds, plan.bound_seconds))
        rows[f"{percent} %"] = {"overhead_percent": overhead, "bound_percent": bound, **times}
        assert overhead - bound <= 0.5
        assert times["processor_s"] < 1.0
    sizes = {"activation_bytes": activation_bytes, "plain_s": plain_s}
    benchmark.extra_info.update(scipy=scipy.__version__, **sizes, figures=rows)
    benchmark.pedantic(lambda: solve(table, budget=activation_bytes // 5), rounds=1, iterations=1)
    with capsys.disabled():
        print(f"\n{shape}: {activation_bytes / 2**30:.1f} GiB, {1000 * plain_s:.0f} ms")
        for memory, row in rows.items():
            print(f"  {memory} memory: " + ", ".join(f"{name} {figure:.3f}" for name, figure in row.items()))
