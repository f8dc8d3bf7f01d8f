"""How close are plans to what no plan can beat, and how long does it take to find them? Computed, nothing is run.

Stacks of the shape of Llama at 8192 tokens, at the assumed rates of `llama_costs.py`; memory is the share of the bytes
that backward needs of all blocks. Run with `python -m pytest benchmarks/test_planner_solver.py`; prints overhead in
percent of a step in which everything is kept. Every plan is played through by the simulator, whose overhead is shown.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import llama_costs
import numpy
import pytest
import scipy
from llama_costs import Table

from actckpt import Action
from actckpt.planner import CostTable, Plan, simulate, solve
from actckpt.planner.improvement import candidate
from actckpt.planner.problem import Problem
from actckpt.planner.program import Program
from actckpt.planner.schedule import evaluate

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


@pytest.mark.parametrize(
    ("shape", "percents"), [("8B, 32 blocks", (10, 20, 40)), ("70B, 80 blocks", (10, 15, 30))], ids=["8B", "70B"]
)
def test_ways_to_plan(
    shape: str, percents: tuple[int, ...], benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _SHAPES[shape]()
    plain_s = llama_costs.plain_seconds(table)
    rows: dict[str, dict[str, float]] = {}
    for percent in percents:
        budget = llama_costs.activation_bytes(table) * percent // 100
        ways = {
            "fluid lower bound": lambda budget=budget: llama_costs.fluid_bound(table, budget),
            "solve": lambda budget=budget: solve(table, budget=budget).overhead_seconds,
            "exact program, gap 1e-3 of a step": lambda budget=budget: _exact_overhead(table, budget),
            "one policy for all blocks": lambda budget=budget: _one_policy_overhead(table, budget),
        }
        for name, way in ways.items():
            start = time.perf_counter()
            overhead = 100 * way() / plain_s
            row = rows.setdefault(name, {})
            row[f"{percent} %: overhead_percent"] = overhead
            row[f"{percent} %: clock_s"] = time.perf_counter() - start
            assert overhead >= rows["fluid lower bound"][f"{percent} %: overhead_percent"] * (1 - 1e-6) - 1e-9
        assert rows["solve"][f"{percent} %: overhead_percent"] <= (
            rows["one policy for all blocks"][f"{percent} %: overhead_percent"] + 1e-9
        )
    benchmark.extra_info.update(figures=rows)
    benchmark.pedantic(lambda: None, rounds=1, iterations=1)
    with capsys.disabled():
        print(f"\n{shape}")
        for name, row in rows.items():
            print(f"  {name}: " + ", ".join(f"{key} {figure:.3f}" for key, figure in row.items()))


def _exact_overhead(table: Table, budget: int) -> float:
    """Return what HiGHS finds with whole actions, not improved."""
    problem = Problem.of(CostTable.from_dict(table), budget)
    found = Program(problem).solve(time_limit_s=60, gap=1e-3, plain=problem.costs.plain_seconds).actions()
    best = None if found is None else candidate(problem, found)
    assert best is not None
    return best.overhead_s


def _one_policy_overhead(table: Table, budget: int) -> float:
    """Return the best of one policy for all blocks: all sets of values to store, all sums of bytes offloaded."""
    problem = Problem.of(CostTable.from_dict(table), budget)
    (block,) = table["classes"].values()
    values, num_blocks = block["values"], len(table["stack"])
    ways: dict[tuple[float, float], float] = {}
    for stored in itertools.product((False, True), repeat=len(values)):
        actions = tuple(Action.KEEP if store else Action.RECOMPUTE for store in stored)
        found = problem.footprint(0, actions)
        if found is None:
            continue
        sums = {0.0}
        for value, store in zip(values, stored, strict=True):
            sums |= {nbytes + value["bytes"] for nbytes in sums if store}
        for away in sums:
            key = found.kept_bytes - away, away
            ways[key] = min(ways.get(key, numpy.inf), found.recompute_s)
    best = numpy.inf
    candidates = numpy.array([(*key, seconds, 0.0) for key, seconds in ways.items()])
    last = numpy.array([sum(value["bytes"] for value in values if value["needed"]), 0.0, 0.0, 0.0])
    for some in numpy.array_split(candidates, len(candidates) // 4096 + 1):
        footprints = numpy.repeat(some[:, None], num_blocks, axis=1)
        footprints[:, -1] = last
        schedule = evaluate(problem, footprints)
        best = min(best, numpy.where(schedule.excess_bytes == 0.0, schedule.overhead_s, numpy.inf).min())
    return float(best)
