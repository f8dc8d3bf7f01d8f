"""One part of `gpu_run.py`: its measurements, as rows of a file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import actckpt
from gpu_parts import copies, te
from gpu_parts.machines import machine
from gpu_parts.methods import (
    CHECKPOINT,
    EAGER,
    KEEPS_MATMULS,
    OFFLOADED_INPUTS,
    PLAIN,
    REPLAYS_ALL,
    TRL_CHECKPOINT,
    Method,
    budgets,
    compiled,
)
from gpu_parts.models import LLAMA, LLAMA_8B, MOE, UNET, VIT, Sizes, toy
from gpu_parts.rows import Row, Rows
from gpu_parts.training import Bench, compare_gradients

_GIB = 1 << 30
#: What the process of long sequences may allocate.
_LONG_BYTES = 70 * _GIB
#: A head so large that its loss has the peak.
_LARGE_HEAD = LLAMA._replace(layers=2, vocabulary=128256)
#: Dense FLOP/s of 16-bit products.
_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def _sizes(rows: Rows, sizes: Sizes) -> Sizes:
    return toy(sizes) if rows.machine.is_rehearsal else sizes


def _backend(rows: Rows) -> str:
    """Return the compiler: the simulated device has no code generator, only torch's partitioner."""
    return "aot_eager_decomp_partition" if rows.machine.is_rehearsal else "inductor"


def _rounds(rows: Rows, rounds: int) -> int:
    return 1 if rows.machine.is_rehearsal else rounds


def _few(rows: Rows, methods: Sequence[Method]) -> Sequence[Method]:
    """Return the first and the last one in a rehearsal."""
    return [methods[0], methods[-1]] if rows.machine.is_rehearsal else methods


def link(rows: Rows, plans: Path) -> None:
    """Bandwidths of the link, by size."""
    sizes = (1, 2) if rows.machine.is_rehearsal else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    with tempfile.TemporaryDirectory() as folder:
        for tier, tier_sizes in (("pinned", sizes), ("disk", sizes[::3])):
            for mib in tier_sizes:
                measure = partial(copies.bandwidths, rows.machine, tier, folder, mib)
                rows.measure(f"{tier}, {mib} MiB", measure, tier=tier, mib=mib)


def capped(rows: Rows, plans: Path) -> None:
    """Train under budgets in a process that may not allocate more, and a step for which memory is short."""
    models = (("8 blocks", LLAMA), ("large head", _LARGE_HEAD))
    for name, sizes in models[:1] if rows.machine.is_rehearsal else models:
        bench = Bench(rows, _sizes(rows, sizes), name, plans)
        bench.run([PLAIN])
        bench.run(_few(rows, budgets((0.0, 0.15, 0.5))), is_capped=True)
        bench.rescue(KEEPS_MATMULS)
        bench.rescue(OFFLOADED_INPUTS)
        bench.forget()


def _side_by_side(rows: Rows, plans: Path, sizes: Sizes, methods: Sequence[Method], rounds: int) -> None:
    bench = Bench(rows, _sizes(rows, sizes), "", plans)
    bench.run([PLAIN, *methods])
    bench.turns(_rounds(rows, rounds))


def llama(rows: Rows, plans: Path) -> None:
    """Llama of 8 blocks, 8,192 tokens: what people choose, and budgets."""
    _side_by_side(rows, plans, LLAMA, [*EAGER[:5], *budgets(), *EAGER[5:]], 8)


def llama_compiled(rows: Rows, plans: Path) -> None:
    """The same with compiled blocks. torch cannot trace attention on the simulated device."""
    methods, ours = compiled(_backend(rows)), budgets(backend=_backend(rows))
    if rows.machine.is_rehearsal:
        _side_by_side(rows, plans, UNET, [*methods[:3], *ours[:1]], 1)
    else:
        _side_by_side(rows, plans, LLAMA, [*methods, *ours, CHECKPOINT], 8)


def vit(rows: Rows, plans: Path) -> None:
    """ViT-L: small blocks, which the host bounds."""
    _side_by_side(rows, plans, VIT, _few(rows, [*EAGER[:5], *budgets((0.0, 0.6, 0.8))]), 4)


def llama_2k(rows: Rows, plans: Path) -> None:
    """Llama with 2,048 tokens."""
    _side_by_side(rows, plans, LLAMA._replace(tokens=2048), _few(rows, [*EAGER[:5], *budgets()]), 4)


def cuda_graphs(rows: Rows, plans: Path) -> None:
    """Steps of a small ViT, whose time is that of the host, beside the same steps in CUDA graphs."""
    actckpt.configure(host_limit=0)  # plans that move nothing
    bench = Bench(rows, _sizes(rows, VIT._replace(layers=12, tokens=32)), "", plans)
    bench.run([PLAIN, REPLAYS_ALL, KEEPS_MATMULS, *budgets((0.4,))])
    bench.capture()


def moe(rows: Rows, plans: Path) -> None:
    """A mixture of experts, whose shapes differ from step to step."""
    _side_by_side(rows, plans, MOE, _few(rows, [*EAGER[:2], EAGER[3], *budgets((0.05, 0.4))]), 4)


def long_context(rows: Rows, plans: Path) -> None:
    """Sequences of 32k, 64k and 128k tokens, in 70 GiB."""
    lengths = ((32768, 8), (65536, 8), (131072, 4))
    for tokens, layers in lengths[:1] if rows.machine.is_rehearsal else lengths:
        sizes = _sizes(rows, LLAMA._replace(tokens=tokens, layers=layers, vocabulary=4096))
        with rows.machine.capped(_LONG_BYTES):
            bench = Bench(rows, sizes, f"{tokens} tokens", plans)
            bench.run([CHECKPOINT, TRL_CHECKPOINT])
            bench.run([Method("actckpt budget 70 GiB", budget=_LONG_BYTES)], most_steps=8)
            bench.forget()
        del bench
        rows.machine.free_memory()


def _model_flops(sizes: Sizes) -> float:
    """Return the FLOPs of a step, without what is computed again: products, and causal attention."""
    kv_dim = sizes.dim // sizes.heads * sizes.kv_heads
    weights = sizes.layers * (2 * sizes.dim * (sizes.dim + kv_dim) + 3 * sizes.dim * sizes.hidden)
    products = 6.0 * sizes.tokens * (weights + sizes.dim * sizes.vocabulary)
    return products + 6.0 * sizes.layers * sizes.tokens**2 * sizes.dim


def llama_8b(rows: Rows, plans: Path) -> None:
    """A model of 8B parameters with AdamW: tokens per second, and the share of the device's FLOP/s."""
    sizes = _sizes(rows, LLAMA_8B)
    bench = Bench(rows, sizes, "", plans, trains=True)
    bench.run([CHECKPOINT])
    bench.run([Method("actckpt budget auto", budget="auto")], most_steps=8)
    gpu = rows.machine.versions()["gpu"]
    flops = next((flops for name, flops in _FLOPS.items() if name in gpu), None)
    for name in bench.trainings:
        seconds = rows.by_name[name]["device_ms"] / 1e3
        rate: Row = {"tokens_per_s": sizes.tokens / seconds if seconds else None}
        rate["mfu"] = None if flops is None else _model_flops(sizes) / seconds / flops
        rows.measure(f"rate, {name}", partial(dict, rate))


def gradients(rows: Rows, plans: Path) -> None:
    """Gradients of each plan that ran, beside plain ones."""
    compare_gradients(rows, plans, _backend(rows))


PARTS: dict[str, Callable[[Rows, Path], None]] = {
    part.__name__: part
    for part in (
        link,
        capped,
        llama,
        llama_compiled,
        long_context,
        llama_8b,
        vit,
        llama_2k,
        cuda_graphs,
        moe,
        gradients,
    )
}
PARTS["transformer_engine"] = lambda rows, plans: te.measure(rows)


def main() -> int:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms need
    parser = argparse.ArgumentParser(prog="python -m gpu_parts", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for PART.jsonl and plans/")
    parser.add_argument("--seconds", type=float, default=120, help="begins no row after that")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the simulated accelerator of the tests")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    with machine(is_rehearsal=args.rehearse) as found:
        if found is None:
            print("gpu_parts: no GPU, nothing measured.")
            return 0
        rows = Rows(args.out / f"{args.part}.jsonl", found, deadline)
        PARTS[args.part](rows, args.out / "plans")
    if rows.failed:
        print(f"failed: {', '.join(rows.failed)}")
    return 1 if rows.failed else 0


if __name__ == "__main__":
    sys.exit(main())
