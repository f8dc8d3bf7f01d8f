"""Peak and step time of methods side by side on a CPU: what users would pick, and budgets.

    python benchmarks/frontiers.py --out benchmarks/results/frontiers_MACHINE_DATE.json

Each method trains a copy of the model, all with the same blocks. A row has the peak of the tensors that a step makes,
without gradients of parameters, as `LiveStorages` counts them. Steps are timed in turns, in an order by chance, by the
CPU time of one thread; `ratios to plain` divides by the plain step of the same round. "Keeps matmuls" keeps results of
matrix products, attention and convolutions, with torch as with actckpt. A budget is a share of the way from the
smallest one to the plain peak, and is timed when its trials are over. `scripts/pictures` draws the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from budget_models import MODELS
from budgets import KEEP_FREED
from gpu_parts.methods import CHECKPOINT, EAGER, KEEPS_MATMULS, MATMULS, PLAIN, Method, budgets, selective

import actckpt
from actckpt._blocks.applied import applied_blocks
from actckpt.memory import LiveStorages

Row = dict[str, Any]

_KEPT = (*MATMULS, "convolution", "_scaled_dot_product_flash_attention_for_cpu")
_SELECTIVE = Method("torch selective, keeps matmuls", selective(*_KEPT))
_RECOMPUTE = next(method for method in EAGER if method.name == "actckpt checkpoint")
_SHARES = (0.02, 0.15, 0.3, 0.5, 0.75)
#: Steps that a method runs first, and at most so many until the trials of a budget are over.
_WARM_UPS, _MOST_STEPS = 3, 100


class _Training:
    """A method on a model of its own."""

    def __init__(self, name: str, method: Method, budget: int | None) -> None:
        torch.manual_seed(0)
        self.model, self._step = MODELS[name]()
        self.facts: Row = {}
        context = None
        if budget is None:
            context = method.prepare(self.model, _blocks(self.model))
        else:
            self.facts["budget_bytes"] = budget
            actckpt.apply(self.model, activation_budget=budget)
        self._context = context or nullcontext

    def step(self) -> None:
        self.model.zero_grad()
        with self._context():
            self._step()

    def settle(self) -> None:
        """Run the first steps; under a budget until its trials are over. Note what it chose."""
        plan, num_unchanged = None, 0
        for _ in range(_MOST_STEPS):
            self.step()
            report = actckpt.report(self.model) if self.facts else None
            is_same = report is None or (report.plan is not None and report.plan is plan and not report.race_steps_left)
            num_unchanged, plan = num_unchanged + 1 if is_same else 0, report.plan if report is not None else None
            if num_unchanged == _WARM_UPS:
                break
        if plan is not None:
            self.facts |= {"chosen": plan.chosen, "predicted_ratio": plan.step_seconds / plan.plain_seconds}

    def seconds(self) -> float:
        start = time.process_time()
        self.step()
        return time.process_time() - start


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that `apply` takes for blocks."""
    actckpt.apply(model)
    names = list(applied_blocks(model))
    actckpt.remove(model)
    return [model.get_submodule(name) for name in names]


def _peak(model: torch.nn.Module, step: Callable[[], object]) -> int:
    with LiveStorages(parameters=model.parameters()) as live:
        step()
    return int(live.peak_bytes)


def _smallest(name: str) -> int:
    """Return the smallest budget of a model."""
    torch.manual_seed(0)
    model, step = MODELS[name]()
    try:
        actckpt.plan(step, model=model, activation_budget=1, race=False)
    except actckpt.errors.PlanInfeasibleError as error:
        return int(error.smallest_bytes or 0)
    raise AssertionError("a byte was enough")


def measure(name: str, shares: tuple[float, ...] = _SHARES, rounds: int = 15) -> dict[str, Row]:
    """Return the rows of a model, by method, and their ratios."""
    load, smallest, plain = os.getloadavg()[0], _smallest(name), 0
    rows, trainings = dict[str, Row](), dict[str, _Training]()
    for method in (PLAIN, CHECKPOINT, _SELECTIVE, _RECOMPUTE, KEEPS_MATMULS, *budgets(shares)):
        share = method.budget_share
        budget = None if share is None else round(smallest + share * (plain - smallest))
        training = trainings[method.name] = _Training(name, method, budget)
        training.settle()
        rows[method.name] = {**training.facts, "peak_allocated_bytes": _peak(training.model, training.step)}
        plain = rows[PLAIN.name]["peak_allocated_bytes"]
        print(name, method.name, rows[method.name], flush=True)
    seconds: dict[str, list[float]] = {method: [] for method in trainings}
    for _ in range(rounds):
        for method in random.sample(list(trainings), len(trainings)):
            seconds[method].append(trainings[method].seconds())
    ratios = {method: _over(column, seconds[PLAIN.name]) for method, column in seconds.items()}
    print(name, ratios, flush=True)
    return {**rows, "ratios to plain": ratios, "load": {"before": load, "after": os.getloadavg()[0]}}


def _over(column: list[float], plain: list[float]) -> Row:
    ratios = [ours / theirs for ours, theirs in zip(column, plain, strict=True)]
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": median, "quartiles": [low, high], "rounds": len(ratios)}


def main() -> None:
    if not KEEP_FREED.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_FREED})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "unet", "moe"], choices=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=_SHARES, help="budgets, 0: the smallest, 1: plain")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: measure(name, tuple(args.shares), args.rounds) for name in args.models}
    results = {
        "command": f"python benchmarks/frontiers.py --rounds {args.rounds}",
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "models": models,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
