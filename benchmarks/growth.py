"""How costs grow: with blocks, operators of a block, saved tensors, parameters and modules.

    python benchmarks/growth.py --out benchmarks/results/growth_MACHINE_DATE.json

CPU milliseconds of what actckpt adds to a step of tiny tensors (the least of three differences to a plain step), per
unit; and resident bytes per saved tensor while a forward's graph is alive. If costs are linear, a row has equal numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actckpt

Step = Callable[[], object]
_REPEATS = 3
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Chain(nn.Module):
    """Elementwise operators, each of which saves its result."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num, self.scale = num, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(self.num):
            x = torch.tanh(x)
        return x


class _Wide(nn.Module):
    """Many parameters, or modules of one parameter, of which one is used."""

    def __init__(self, num: int, *, are_modules: bool) -> None:
        super().__init__()
        made = [nn.Linear(1, 1, bias=False) if are_modules else nn.Parameter(torch.ones(1)) for _ in range(num)]
        self.parts = nn.ModuleList(made) if are_modules else nn.ParameterList(made)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.parts[0].weight if isinstance(self.parts, nn.ModuleList) else self.parts[0]
        return torch.tanh(x * weight)


def _stack(num: int, length: int = 4) -> nn.Sequential:
    return nn.Sequential(*(_Chain(length) for _ in range(num)))


def _step(model: Callable[[Tensor], Tensor]) -> None:
    model(torch.ones(4, requires_grad=True)).sum().backward()


def _cpu_ms(step: Step) -> float:
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def _added_ms(plain: Step, ours: Step) -> float:
    for _ in range(2):
        ours()  # the first runs are audited
    return min(_cpu_ms(ours) - _cpu_ms(plain) for _ in range(_REPEATS))


def _applied(model: nn.Module, **options: Any) -> nn.Module:
    actckpt.apply(model, blocks=_Chain, **options)
    return model


def _blocks(num: int, **options: Any) -> float:
    return _added_ms(partial(_step, _stack(num)), partial(_step, _applied(_stack(num), **options)))


def _budget_ms(num: int) -> float:
    """Return the CPU milliseconds of the first six cycles under a budget: profile, solve, trials."""
    model = _applied(_stack(num), activation_budget="60%", race=False)
    return sum(_cpu_ms(partial(_step, model)) for _ in range(6))


def _regions(num: int, *, are_modules: bool, regions: int = 20) -> float:
    model, x = _Wide(num, are_modules=are_modules), torch.ones(4, requires_grad=True)

    def ours() -> None:
        total = sum(actckpt.checkpoint(model, x, use_reentrant=False) for _ in range(regions))
        total.sum().backward()  # type: ignore[union-attr]

    return _added_ms(lambda: sum(model(x) for _ in range(regions)).sum().backward(), ours) / regions


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _bytes_per_tensor(num: int, *, is_ours: bool) -> float:
    model = _stack(1, num)
    if is_ours:
        _applied(model, policy=[])
    before = _resident_bytes()
    out = model(torch.ones(4, requires_grad=True))
    found = (_resident_bytes() - before) / num
    out.sum().backward()
    return found


_ROWS: dict[str, tuple[Callable[[int], float], Sequence[int]]] = {
    "ms per block, checkpoint": (lambda num: _blocks(num) / num, (8, 32, 128, 512)),
    "ms per block, policy": (lambda num: _blocks(num, policy=[]) / num, (8, 32, 128, 512)),
    "ms per block, first six cycles under a budget": (lambda num: _budget_ms(num) / num, (8, 32, 128, 512)),
    "ms per operator of a block, policy": (
        lambda num: (
            _added_ms(partial(_step, _stack(1, num)), partial(_step, _applied(_stack(1, num), policy=[]))) / num
        ),
        (100, 1000, 10_000, 100_000),
    ),
    "ms per region, parameters of the model": (partial(_regions, are_modules=False), (10, 100, 1000, 10_000)),
    "ms per region, modules of the model": (partial(_regions, are_modules=True), (10, 100, 500, 5000)),
    "bytes per saved tensor, plain": (partial(_bytes_per_tensor, is_ours=False), (1000, 10_000, 100_000)),
    "bytes per saved tensor, policy": (partial(_bytes_per_tensor, is_ours=True), (1000, 10_000, 100_000)),
}


def measure(most: int | None = None) -> dict[str, dict[int, float]]:
    """Return each row by size, up to `most`."""
    found: dict[str, dict[int, float]] = {}
    for name, (cost, sizes) in _ROWS.items():
        cost(sizes[0])  # imports, and caches that all share
        found[name] = {size: cost(size) for size in sizes if most is None or size <= most}
        print(name, {size: round(value, 4) for size, value in found[name].items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="the largest size")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": "python benchmarks/growth.py",
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "figures": measure(args.most),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
