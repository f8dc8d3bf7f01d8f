"""How costs grow with blocks, operators of a block, saved tensors, parameters and modules of a model.

    python benchmarks/growth.py --out benchmarks/results/growth_MACHINE_DATE.json

Microseconds of CPU time that actckpt adds to a training step of tiny tensors, per block, operator or region: medians of
differences to plain steps in turns, one thread, without audits. Where costs are linear, sizes have equal figures.
Planning is CPU time of the first six steps under a budget. Bytes are those that `mallinfo2` of glibc counts between a
forward and its backward, per saved tensor, in a process whose Python objects come from `malloc`, too.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actckpt

_PAIRS, _OPERATORS, _REGIONS = 5, 4, 20


class _Chain(nn.Module):
    """Operators that each save their result; parameters and modules beyond the first have no part in the result."""

    def __init__(self, operators: int, parameters: int = 1, modules: int = 0) -> None:
        super().__init__()
        self.operators = operators
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(parameters))
        self.parts = nn.ModuleList(nn.Tanh() for _ in range(modules))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0]
        for _ in range(self.operators):
            x = torch.tanh(x)
        return x

    def part(self, x: Tensor, index: int) -> Any:
        return self.parts[index](x * self.scales[0])


Forward = Callable[[Tensor], Any]
#: By row and size.
Figures = dict[str, dict[str, dict[str, float]]]


def _cpu_s(forward: Forward) -> float:
    """Return the CPU seconds of a step."""
    start = time.process_time()
    forward(torch.ones(4, requires_grad=True)).sum().backward()
    return time.process_time() - start


def _added_us(plain: Forward, ours: Forward, num: int) -> dict[str, float]:
    """Return microseconds per unit of a step, and those that ours adds to a plain one."""
    _cpu_s(plain), _cpu_s(ours)  # the first takes longer
    pairs = [(_cpu_s(plain), _cpu_s(ours)) for _ in range(1 if num > 10_000 else _PAIRS)]
    plain_us = statistics.median(plain for plain, _ in pairs) * 1e6 / num
    added_us = statistics.median(ours - plain for plain, ours in pairs) * 1e6 / num
    return {"plain_us": plain_us, "added_us": added_us, "ratio": 1 + added_us / plain_us}


def _stack(num: int, *block: int, **options: Any) -> nn.Sequential:
    model = nn.Sequential(*(_Chain(*block) for _ in range(num)))
    if options:
        actckpt.apply(model, blocks=_Chain, **options)
    return model


def _applied(num: int, *, blocks: int | None = None, **options: Any) -> dict[str, float]:
    """Return figures per block, or per operator of all of so many blocks."""
    sizes = (num, _OPERATORS) if blocks is None else (blocks, num // blocks)
    plain, ours, planning = _stack(*sizes), _stack(*sizes, **options), {}
    if "activation_budget" in options:
        planning["planning_us"] = sum([_cpu_s(ours) for _ in range(14)][:6]) * 1e6 / num
    return _added_us(plain, ours, num) | planning


def _widths(num: int, of: str) -> dict[str, float]:
    """Return figures per region of a stack whose blocks have so many parameters or modules each."""
    sizes = _REGIONS, _OPERATORS, *((num, 0) if of == "parameters" else (1, num))
    return _added_us(_stack(*sizes), _stack(*sizes, policy="recompute"), _REGIONS)


def _parts(num: int, kind: str) -> dict[str, float]:
    """Return figures per region around each of the modules of one model."""
    model = _Chain(0, 1, num)
    runs = (model.part, partial(_part, model, kind))
    plain, ours = (lambda x, run=run: reduce(run, range(num), x) for run in runs)
    return _added_us(plain, ours, num)


def _part(model: _Chain, kind: str, x: Tensor, index: int) -> Any:
    if kind == "module":
        return actckpt.checkpoint(model.parts[index], x * model.scales[0], use_reentrant=False)
    if kind == "method":
        return actckpt.checkpoint(model.part, x, index, use_reentrant=False)
    with actckpt.region([]):
        return model.part(x, index)


def _bytes_held(method: str, num: int) -> float:
    """Return the bytes per saved tensor, of this process, while the graph of a forward is alive."""
    options: dict[str, dict[str, Any]] = {"plain": {}, "recompute": {"policy": "recompute"}, "policy": {"policy": []}}
    model, x = _stack(1, 1000, **options[method]), torch.ones(4, requires_grad=True)
    model(x).sum().backward(), model(x).sum().backward()  # allocates what stays
    setattr(model[0], "operators", num)  # noqa: B010
    before = _allocated_bytes()
    out = model(x)
    held = (_allocated_bytes() - before) / num
    out.sum().backward()
    return held


def _allocated_bytes() -> int:
    """Return the bytes in use, on the heap and in mappings: fields 7 and 4 of `mallinfo2`."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(f"f{i}", ctypes.c_size_t) for i in range(10)]})
    return int((found := info()).f7 + found.f4)


def _bytes(num: int, method: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--bytes", method, str(num)]
    done = subprocess.run(command, env=os.environ | {"PYTHONMALLOC": "malloc"}, check=True, capture_output=True)
    return {"bytes": float(done.stdout)}


_BLOCKS, _LENGTHS, _WIDTHS = (8, 32, 128, 512), (100, 1000, 10_000, 100_000), (10, 100, 1000)
_PARTS, _TENSORS = (8, 32, 125, 500), (1000, 10_000, 100_000)
_BUDGET: dict[str, Any] = {"activation_budget": "60%", "race": False}
_ROWS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...]]] = {
    "blocks, `apply(model)`": (partial(_applied, policy="recompute"), _BLOCKS),
    "blocks, a policy": (partial(_applied, policy=[]), _BLOCKS),
    "blocks, a budget": (partial(_applied, **_BUDGET), _BLOCKS),
    "operators of a block, `apply(model)`": (partial(_applied, blocks=1, policy="recompute"), _LENGTHS),
    "operators of a block, a policy": (partial(_applied, blocks=1, policy=[]), _LENGTHS),
    "operators of 4 blocks, a budget": (partial(_applied, blocks=4, **_BUDGET), (100, 400, 1600)),
    "parameters of each block": (partial(_widths, of="parameters"), _WIDTHS),
    "modules of each block": (partial(_widths, of="modules"), _WIDTHS),
    "parts of a model, `checkpoint` of a module": (partial(_parts, kind="module"), _PARTS),
    "parts of a model, `checkpoint` of a method": (partial(_parts, kind="method"), _PARTS),
    "parts of a model, `region`": (partial(_parts, kind="region"), _PARTS),
    "saved tensors, plain": (partial(_bytes, method="plain"), _TENSORS),
    "saved tensors, `apply(model)`": (partial(_bytes, method="recompute"), _TENSORS),
    "saved tensors, a policy": (partial(_bytes, method="policy"), _TENSORS),
}


def measure(most: int = 100_000, only: tuple[str, ...] = ("",)) -> Figures:
    """Return the figures by row and size, up to `most`; only rows whose names begin like that."""
    found: Figures = {}
    for name, (cost, sizes) in ((name, row) for name, row in _ROWS.items() if name.startswith(only)):
        cost(sizes[0])  # imports, and caches that all share
        found[name] = {str(size): cost(size) for size in sizes if size <= most}
        print(name, found[name], flush=True)
    return found


def table(figures: Figures) -> str:
    """Return the table of docs/growth.md."""
    lines = ["| number of | sizes | microseconds or bytes, by size |", "|---|---|---|"]
    for name, row in figures.items():
        for key, text in {"added_us": "", "planning_us": ", planning", "bytes": ", bytes"}.items():
            cells = [f"{found[key]:.{0 if found[key] >= 100 else 1}f}" for found in row.values() if key in found]
            if cells:
                lines.append(f"| {name}{text} | {', '.join(row)} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bytes", nargs=2, metavar=("METHOD", "SIZE"), help="print the bytes of one size only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    actckpt.configure(audit="off")
    if arguments.bytes is not None:
        print(_bytes_held(arguments.bytes[0], int(arguments.bytes[1])))
        return
    figures = measure()
    if arguments.out is not None:
        result = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "figures": figures}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
