"""Budgets: fifteen between the smallest and what plain training needs, for four models; measured peaks and times.

    python benchmarks/budgets.py [--models llama vit unet moe] [--budgets 15] [--pairs 15] [--out RESULT.json]

For each budget `actckpt.plan` is asked without a race. Peaks are those of `LiveStorages` in a step under the plan,
after one to warm up. Times are taken in turns: this plan, the one that wins a race, a plain step, and each simple
choice whose peak fits; a row has the median of the ratios winner / best simple choice over all pairs with its 95 %
interval (bootstrap), and of plan / plain beside what was predicted. glibc is told to keep memory that is freed, as
caching allocators of devices do: otherwise a plain step, which holds most, waits longest for new pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from budget_models import MODELS

import actckpt
from actckpt._blocks.applied import applied_blocks
from actckpt._budget.running import Candidate
from actckpt._budget.simple import simple_plans
from actckpt._core.training_state import TrainingState


def _interval(ratios: list[float]) -> list[float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 4), round(medians[1949], 4)]


class _Bench:
    """One model, and its step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.step = MODELS[name]()
        self.step()
        self.state = TrainingState(self.model)

    def candidate(self, plan: actckpt.Plan | None, name: str = "") -> Candidate:
        """Return a way to run the step, with its peak."""
        forwards = {}
        if plan is not None:
            actckpt.apply(self.model, policy=plan)
            forwards = {block: block.forward for block in applied_blocks(self.model).values()}
            actckpt.remove(self.model)
        found = Candidate(name, self.model, forwards, self.step, self.state)
        found.run()
        found.measure_memory()
        return found

    def smallest(self) -> int:
        """Return the smallest budget."""
        try:
            actckpt.plan(self.step, model=self.model, activation_budget=1, race=False)
        except actckpt.errors.PlanInfeasibleError as error:
            assert error.smallest_bytes is not None
            return int(error.smallest_bytes)
        raise AssertionError("a byte was enough")

    def row(self, budget: int, num_pairs: int) -> dict[str, Any]:
        """Return what was measured for one budget."""
        plan = actckpt.plan(self.step, model=self.model, activation_budget=budget, race=False)
        ours = self.candidate(plan)
        row: dict[str, Any] = {
            "budget_bytes": budget,
            "predicted_peak_bytes": int(plan.peak_bytes),
            "peak_bytes": ours.peak_bytes,
            "fits": ours.peak_bytes <= budget,
            "predicted_ratio_to_plain": round(plan.step_seconds / plan.plain_seconds, 4),
        }
        if num_pairs:
            row |= self._timed(plan, ours, num_pairs)
        return row

    def _timed(self, plan: actckpt.Plan, planned: Candidate, num_pairs: int) -> dict[str, Any]:
        raced = actckpt.plan(self.step, model=self.model, activation_budget=int(plan.budget_bytes))
        ours = self.candidate(raced)
        known = {"blocks": plan.blocks, "places": plan.places}
        others = [self.candidate(dataclasses.replace(each, **known), name) for name, each in simple_plans(plan.costs)]
        plain = others[0]
        fitting = [each for each in others if each.peak_bytes <= plan.budget_bytes]
        running = [ours, planned, plain, *(each for each in fitting if each is not plain)]
        for _ in range(num_pairs):
            random.shuffle(running)
            for candidate in running:
                candidate.time()
        row: dict[str, Any] = {"ratio_to_plain": ratio(planned, plain)[0], "chosen": raced.chosen}
        if fitting:
            best = min(fitting, key=lambda each: statistics.median(each.seconds))
            median, interval = ratio(ours, best)
            row |= {"best_simple": best.name, "ratio_to_best_simple": median, "interval_95": interval}
        return row


def ratio(ours: Candidate, theirs: Candidate) -> tuple[float, list[float]]:
    """Return the median of ratios of steps that were timed in turns, and its 95 % interval."""
    ratios = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return round(statistics.median(ratios), 4), _interval(ratios)


def measure(name: str, num_budgets: int, num_pairs: int) -> dict[str, Any]:
    """Return the rows of one model."""
    bench = _Bench(name)
    plain, smallest = bench.candidate(None).peak_bytes, bench.smallest()
    rows = []
    for number in range(num_budgets):
        budget = smallest + round((plain - smallest) * number / max(num_budgets - 1, 1))
        rows.append(bench.row(budget, num_pairs))
        print(name, rows[-1], flush=True)
    return {"plain_peak_bytes": plain, "smallest_bytes": smallest, "rows": rows}


#: Both thresholds of glibc's allocator, in bytes: more than there is.
KEEP_FREED = {f"MALLOC_{which}_THRESHOLD_": str(2**40) for which in ("TRIM", "MMAP")}


def main() -> None:
    if not KEEP_FREED.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_FREED})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--budgets", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": f"python benchmarks/budgets.py --budgets {args.budgets} --pairs {args.pairs}",
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "load_before": os.getloadavg()[0],
        "models": {name: measure(name, args.budgets, args.pairs) for name in args.models},
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
