"""What the first cycles of a budget take, over plain steps: of the first length of the inputs, and of a further one.

    python benchmarks/first_cycles.py [--layers 12] [--width 768] [--tokens 128 160] [--models 5] [--out RESULT.json]

A stack of `torch.nn.TransformerEncoderLayer` of GPT-2 small's depth and width, float32, batch 2, one thread. Each of
several new models trains six cycles with the first length, then six with the second one, under a budget of 60 % of the
activations. Plain steps of the same length run before and after them; each cycle is divided by the median of these.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import actckpt

#: Cycles of each length under the budget, and plain steps beside them.
_NUM_CYCLES, _NUM_PLAIN = 6, 3


def _model(*, layers: int, width: int) -> torch.nn.Module:
    def layer() -> torch.nn.Module:
        heads, hidden = width // 64, 4 * width
        return torch.nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)

    return torch.nn.Sequential(*(layer() for _ in range(layers)))


def _seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - start


def measure(*, layers: int, width: int, tokens: list[int], models: int) -> dict[str, Any]:
    """Return, per length, the ratios of each cycle to plain steps, for each model."""
    torch.manual_seed(0)
    plain = _model(layers=layers, width=width)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    inputs = {length: torch.randn(2, length, width) for length in tokens}
    for x in inputs.values():
        _seconds(plain, optimizer, x)
    ratios: dict[int, list[list[float]]] = {length: [] for length in tokens}
    for _ in range(models):
        model = copy.deepcopy(plain)
        trained = torch.optim.SGD(model.parameters(), lr=0.0)
        actckpt.apply(model, activation_budget="60%", race=False)
        for length, x in inputs.items():
            plain_s = [_seconds(plain, optimizer, x) for _ in range(_NUM_PLAIN)]
            cycles_s = [_seconds(model, trained, x) for _ in range(_NUM_CYCLES)]
            plain_s += [_seconds(plain, optimizer, x) for _ in range(_NUM_PLAIN)]
            ratios[length].append([each / statistics.median(plain_s) for each in cycles_s])
    return {str(length): _figures(rows) for length, rows in ratios.items()}


def _figures(rows: list[list[float]]) -> dict[str, Any]:
    cycles = list(zip(*rows, strict=True))
    return {
        "median": [round(statistics.median(cycle), 2) for cycle in cycles],
        "least": [round(min(cycle), 2) for cycle in cycles],
        "most": [round(max(cycle), 2) for cycle in cycles],
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs=2, default=[128, 160])
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    figures = measure(layers=args.layers, width=args.width, tokens=args.tokens, models=args.models)
    for length, rows in figures.items():
        print(f"{length} tokens: {rows}")
    if args.out is not None:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        command = f"python benchmarks/first_cycles.py --models {args.models}"
        about = {"command": command, "date": datetime.date.today().isoformat(), "versions": versions}
        machine = {"cores": os.cpu_count(), "load_before": round(load, 2)}
        args.out.write_text(json.dumps(about | {"machine": machine, "ratios_to_plain": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
