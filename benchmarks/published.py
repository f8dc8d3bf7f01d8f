"""Published tables of rematerialization, and what plans need for the same shares of memory.

    python benchmarks/published.py --out benchmarks/results/published_MACHINE_DATE.json

1. MONeT's README (PyTorch 1.5, one GPU) and the data file of DTR's prototype: memory and time by budget. Here a CPU
   trains the same models with smaller inputs. A published budget becomes a share of activations: what is not
   parameters, gradients and inputs. Each row has the published step over plain, the one predicted for a plan of that
   share, the one measured (CPU time), and the plan's measured peak.
2. torch's `activation_memory_budget` on a small Llama, which is compiled without a code generator (pytorch#197838 has
   such a table): the peak for each budget, and that of a plan with the same number as its share of activations.

Only shares and ratios compare: sizes, libraries and devices differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from published_models import MODELS
from torch import nn
from torch.nn import functional

import actckpt
from actckpt import planner
from actckpt.demo import LanguageModel
from actckpt.memory import LiveStorages

Row = dict[str, Any]

#: GB of plain training, and GB with added time in percent (https://github.com/utsaslab/MONeT, README).
_MONET: dict[str, tuple[float, list[tuple[float, float]]]] = {
    "ResNet-50": (15.06, [(10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95)]),
    "GoogLeNet": (14.93, [(9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77)]),
    "UNet": (14.32, [(10.01, -4.10), (9.01, -2.07), (8.02, -0.09), (7.00, 1.39), (6.01, 4.95), (5.01, 11.51)]),
    "MobileNet v2": (14.46, [(10.02, 2.40), (9.01, 3.10), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72)]),
    "VGG-16": (14.12, [(9.71, -5.30), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.90, 5.44), (5.51, 9.11)]),
}
#: MB of model and inputs, MB and ms of plain training, MB and ms by budget (medians of
#: https://github.com/uwsampl/dtr-prototype, data_files/data-full.json). UNet's budgets of 7 and 4 GB are left out: they
#: took more than larger ones.
_DTR: dict[str, tuple[float, float, float, list[tuple[float, float]]]] = {
    "transformer": (274, 9872, 285.4, [(8139, 317.3), (6193, 326.0), (4199, 338.6), (2332, 454.3)]),
    "UNet": (121, 8419, 418.9, [(8219, 446.4), (6355, 477.3)]),
    "LSTM": (598, 11123, 1412.4, [(10024, 1735.3), (8026, 1769.7), (6026, 1826.5), (4026, 1996.2)]),
    "Tree-LSTM": (526, 8932, 1261.6, [(8002, 2082.6), (6002, 2330.0), (4002, 2638.6), (2003, 3809.6)]),
}
#: The first steps of a plan are audited.
_WARM_UPS = 3
_PARTITIONER_BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)


def _published(name: str, num_parameters: int) -> list[Row]:
    """Return the published budgets of a model as shares of activations, with the step over the plain one."""
    rows = []
    if name in _MONET:
        plain, entries = _MONET[name]
        fixed = 2 * 4 * num_parameters / 1e9  # parameters and gradients
        rows += [
            {"source": "MONeT", "share": (size - fixed) / (plain - fixed), "published_ratio": 1 + percent / 100}
            for size, percent in entries
        ]
    if name in _DTR:
        fixed, plain, plain_ms, times = _DTR[name]
        rows += [
            {"source": "DTR", "share": (size - fixed) / (plain - fixed), "published_ratio": ms / plain_ms}
            for size, ms in times
        ]
    return rows


def _cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _peak(model: nn.Module, step: Callable[[], object]) -> int:
    with LiveStorages(parameters=model.parameters()) as live:
        step()
    return int(live.peak_bytes)


def _measured(model: nn.Module, step: Callable[[], object], plan: actckpt.Plan, num_steps: int) -> Row:
    """Return the peak of a step under a plan, and its CPU time over that of plain ones."""
    before = [_cpu_seconds(step) for _ in range(num_steps)]
    actckpt.apply(model, policy=plan)
    try:
        for _ in range(_WARM_UPS):
            step()
        peak = _peak(model, step)
        ours = [_cpu_seconds(step) for _ in range(num_steps)]
    finally:
        actckpt.remove(model)
    plain = before + [_cpu_seconds(step) for _ in range(num_steps)]
    return {"peak_bytes": peak, "measured_ratio": statistics.median(ours) / statistics.median(plain)}


def published(name: str, num_steps: int) -> Row:
    """Return the rows of a model: one plan's costs, solved for each published share."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    plain = _peak(model, step)
    plan = actckpt.plan(step, model=model, activation_budget="100%", race=False)
    rows = []
    for row in _published(name, sum(parameter.numel() for parameter in model.parameters())):
        try:
            found = planner.solve(plan.costs, budget=row["share"] * plan.budget_bytes)
        except planner.PlanInfeasibleError as error:
            rows.append(row | {"smallest_share": (error.smallest_bytes or 0) / plan.budget_bytes})
            continue
        found = dataclasses.replace(found, blocks=plan.blocks, places=plan.places)
        row |= {"predicted_ratio": found.step_seconds / found.plain_seconds}
        measured = _measured(model, step, found, num_steps)
        rows.append(row | measured | {"peak_share": measured["peak_bytes"] / plain})
        print(name, rows[-1], flush=True)
    return {"plain_peak_bytes": plain, "num_blocks": len(plan.costs.stack), "rows": rows}


def partitioner() -> Row:
    """Return peaks of torch's `activation_memory_budget`, and of plans for the same shares."""
    torch.manual_seed(0)
    model, tokens = (
        LanguageModel(layers=4, dim=128, heads=4, kv_heads=2, seq=256, dropout=0.0),
        torch.randint(256, (4, 256)),
    )

    def step(forward: Callable[[Any], Any] = model) -> None:
        model.zero_grad()
        functional.cross_entropy(forward(tokens).flatten(0, 1), tokens.flatten()).backward()

    step()
    plain, rows = _peak(model, step), []
    for budget in _PARTITIONER_BUDGETS:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            step(compiled)
        row: Row = {"budget": budget, "torch_peak_share": _peak(model, partial(step, compiled)) / plain}
        try:
            plan = actckpt.plan(step, model=model, activation_budget=budget, race=False)
        except planner.PlanInfeasibleError as error:
            row["smallest_share"] = (error.smallest_bytes or 0) / plain
        else:
            row["peak_share"] = _measured(model, step, plan, 1)["peak_bytes"] / plain
        rows.append(row)
        print(row, flush=True)
    return {"plain_peak_bytes": plain, "rows": rows}


def table(figures: dict[str, Any]) -> str:
    """Return the rows of models as the table of docs/benchmarks.md."""
    lines = ["| model | share of activations | published | predicted | measured | peak |", "|---|---|---|---|---|---|"]
    for name, found in figures["models"].items():
        for row in found["rows"]:
            ours = f"no plan below {row.get('smallest_share', 0):.2f} | | |"
            if "measured_ratio" in row:
                ours = f"{row['predicted_ratio']:.2f} | {row['measured_ratio']:.2f} | {row['peak_share']:.2f} |"
            lines.append(f"| {name}, {row['source']} | {row['share']:.2f} | {row['published_ratio']:.2f} | {ours}")
    return "\n".join(lines) + "\n"


def partitioner_table(figures: dict[str, Any]) -> str:
    """Return the rows of `activation_memory_budget` as the table of docs/benchmarks.md."""
    lines = ["| budget | peak with torch's | peak of a plan |", "|---|---|---|"]
    for row in figures["activation_memory_budget"]["rows"]:
        ours = f"{row['peak_share']:.2f}" if "peak_share" in row else f"no plan below {row['smallest_share']:.2f}"
        lines.append(f"| {row['budget']} | {row['torch_peak_share']:.2f} | {ours} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="of a plan, and plain ones before and after")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": f"python benchmarks/published.py --steps {args.steps}",
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "load_before": os.getloadavg()[0],
        "figures": {
            "models": {name: published(name, args.steps) for name in args.models},
            "activation_memory_budget": partitioner(),
        },
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
