"""Offloading on a GPU: bandwidths, hidden copies and peak memory. Runs unattended, writes JSON.

    python benchmarks/gpu_offload.py --layers 8 --tokens 8192

Measures a loop of pinned copies beside ours from 1 to 512 MiB, each way and both at once; then training steps of a
Llama-8B-shaped stack: plain, offload, torch's save_on_cpu(pin_memory=True), checkpoint, and checkpoint with offloaded
inputs. The hidden share is 1 - (step - step plain) / copy time, from CUDA events.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from torch.autograd.graph import save_on_cpu

import actckpt

_MIB = 1 << 20
_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
_DIM, _HEADS, _KV_HEADS, _HIDDEN = 4096, 32, 8, 14336

Context = Callable[[], AbstractContextManager[Any]]


class Block(torch.nn.Module):
    """A decoder block of the shape of Llama 3 8B's, without rotation."""

    def __init__(self) -> None:
        super().__init__()
        head = _DIM // _HEADS
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(_DIM), torch.nn.RMSNorm(_DIM)
        self.q, self.o = torch.nn.Linear(_DIM, _DIM, bias=False), torch.nn.Linear(_DIM, _DIM, bias=False)
        self.k = torch.nn.Linear(_DIM, _KV_HEADS * head, bias=False)
        self.v = torch.nn.Linear(_DIM, _KV_HEADS * head, bias=False)
        self.gate, self.up = torch.nn.Linear(_DIM, _HIDDEN, bias=False), torch.nn.Linear(_DIM, _HIDDEN, bias=False)
        self.down = torch.nn.Linear(_HIDDEN, _DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shape (1, tokens, dim)."""
        h = self.attention_norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, _DIM // _HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _milliseconds(work: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    torch.cuda.synchronize()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _loop_bandwidths(nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of copies between pinned and device memory on side streams."""
    device_a, device_b = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    host_a, host_b = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    out, back = torch.cuda.Stream(), torch.cuda.Stream()

    def copies(does_out: bool, does_back: bool) -> None:
        for _ in range(repeats):
            if does_out:
                with torch.cuda.stream(out):
                    host_a.copy_(device_a, non_blocking=True)
            if does_back:
                with torch.cuda.stream(back):
                    device_b.copy_(host_b, non_blocking=True)

    kinds = {"out": (True, False), "back": (False, True), "both": (True, True)}
    found = {}
    for name, flags in kinds.items():
        copies(*flags)
        samples = [_milliseconds(lambda flags=flags: copies(*flags)) for _ in range(5)]
        found[name] = nbytes * repeats * sum(flags) / statistics.median(samples) * 1e3
    return found


def _our_bandwidths(nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of the hooks: many tensors saved, then all read."""
    tensors = [torch.randn(nbytes // 4, device="cuda", requires_grad=True) * 1 for _ in range(repeats)]
    out_samples, back_samples = [], []
    for _ in range(6):
        outputs: list[torch.Tensor] = []

        def save(outputs: list[torch.Tensor] = outputs) -> None:
            with actckpt.offload(min_bytes=0):
                outputs += [_KeepInput.apply(tensor) for tensor in tensors]  # noqa: B023 - called in this round

        def read(outputs: list[torch.Tensor] = outputs) -> None:
            for output in reversed(outputs):
                _ = output.grad_fn.saved_tensors  # type: ignore[union-attr]

        out_samples.append(_milliseconds(save))
        # The sources are alive still; take them away so that bytes must come back.
        values = [tensor.shape for tensor in tensors]
        tensors.clear()
        back_samples.append(_milliseconds(read))
        del outputs
        tensors += [torch.randn(*shape, device="cuda", requires_grad=True) * 1 for shape in values]
    total = nbytes * repeats
    return {
        "out": total / statistics.median(out_samples[1:]) * 1e3,
        "back": total / statistics.median(back_samples[1:]) * 1e3,
    }


class _KeepInput(torch.autograd.Function):
    """Saves its input and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * grad


def _train(layers: int, tokens: int, method: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = torch.nn.Sequential(*(Block() for _ in range(layers))).bfloat16()
    x = torch.randn(1, tokens, _DIM, device="cuda", dtype=torch.bfloat16)
    if method.startswith("checkpoint"):
        actckpt.apply(model, blocks=Block, offload_inputs=method == "checkpoint, offloaded inputs")
    contexts: dict[str, Context] = {
        "offload": actckpt.offload,
        "save_on_cpu": lambda: save_on_cpu(pin_memory=True),
    }
    context = contexts.get(method, nullcontext)

    def step() -> None:
        with context():
            y = model(x).float().square().mean()
        y.backward()

    milliseconds = []
    actckpt.reset_stats()
    try:
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            milliseconds.append(_milliseconds(step))
            model.zero_grad(set_to_none=False)
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    figures = actckpt.stats()
    return {
        "step_ms": statistics.median(milliseconds[2:]),
        "all_step_ms": milliseconds,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "moved_bytes_per_step": figures.offloaded_bytes // steps,
        "kept_full": figures.kept_full,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_offload.json")
    args = parser.parse_args()
    if args.layers < 1 or min(args.tokens) < 1 or args.steps < 3:
        parser.error("--layers and --tokens must be at least 1, --steps at least 3")
    if not torch.cuda.is_available():
        print("gpu_offload: no CUDA device, nothing measured.")
        return 0
    figures: dict[str, Any] = {"copies": {}, "training": {}}
    for mib in _SIZES:
        repeats = max(4, min(64, 1024 // mib))
        loop, ours = _loop_bandwidths(mib * _MIB, repeats), _our_bandwidths(mib * _MIB, repeats)
        figures["copies"][f"{mib} MiB"] = {"loop": loop, "ours": ours, "share": {n: ours[n] / loop[n] for n in ours}}
        print(f"{mib} MiB: ours over loop", {name: f"{ours[name] / loop[name]:.2f}" for name in ours})
    fast = figures["copies"]["64 MiB"]["loop"]
    for tokens in args.tokens:
        rows: dict[str, Any] = {}
        for method in ("plain", "offload", "save_on_cpu", "checkpoint", "checkpoint, offloaded inputs"):
            rows[method] = _train(args.layers, tokens, method, args.steps)
            torch.cuda.empty_cache()
        for method, base in (("offload", "plain"), ("checkpoint, offloaded inputs", "checkpoint")):
            if "step_ms" in rows[method] and "step_ms" in rows[base]:
                copy_ms = rows[method]["moved_bytes_per_step"] * (1 / fast["out"] + 1 / fast["back"]) * 1e3
                late_ms = rows[method]["step_ms"] - rows[base]["step_ms"]
                rows[method] |= {"copy_ms": copy_ms, "hidden_share": 1 - late_ms / copy_ms if copy_ms else None}
        figures["training"][f"{tokens} tokens"] = rows
        print(f"{tokens} tokens: {json.dumps(rows)}")
    result = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": {"gpu": torch.cuda.get_device_name(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "layers": args.layers,
        "figures": figures,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
