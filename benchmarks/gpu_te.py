"""TransformerEngine on a GPU: our tests on it, then step time and peak memory. Runs unattended, writes JSON.

    python benchmarks/gpu_te.py --layers 8 --tokens 8192

Tests: tests/gpu/test_te_gpu.py, whose JSON (what passed, where te.checkpoint differs from plain training) goes into the
result. Training: a stack of TransformerLayers (hidden 4096, 32 heads) in bf16 and with delayed scaling: plain,
te.checkpoint both ways, TransformerEngine's CPU offloading, and ours. Begins no measurement after --minutes, and ends
one that hangs a minute and a half later.
"""

import argparse
import faulthandler
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import actckpt
from actckpt._core import devices

_HIDDEN, _HEADS = 4096, 32
_ROOT = Path(__file__).parents[1]

Forward = Callable[[torch.Tensor], torch.Tensor]


def _run_tests(seconds: float) -> dict[str, Any]:
    """Run the tests in a process of their own; a failure is a result, not the end."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        start = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "tests/gpu/test_te_gpu.py", "-q", "-rs", "--tb=short"],
                cwd=_ROOT,
                env={**os.environ, "ACTCKPT_TE_RESULTS": str(results)},
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as expired:
            return {"timed_out_after_s": seconds, "output": str(expired.stdout)[-4000:]}
        found = json.loads(results.read_text()) if results.exists() else {}
        return found | {
            "exit_status": done.returncode,
            "seconds": time.monotonic() - start,
            "output": done.stdout[-6000:],
        }


def _forwards(te: Any, model: torch.nn.ModuleList) -> dict[str, Callable[[], Forward]]:
    """Return, by method, what prepares the model and returns its forward."""

    def per_layer(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = call(layer, x)
            return x

        return forward

    def offloaded(layer: Any, x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload():
            return layer(x)  # type: ignore[no-any-return]

    def te_offload() -> Forward:
        context, synchronize = te.get_cpu_offload_context(
            enabled=True, num_layers=max(len(model) - 2, 1), model_layers=len(model)
        )

        def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
            with context:
                x = layer(x)
            return synchronize(x)  # type: ignore[no-any-return]

        return per_layer(call)

    def wrapped(policy: Any, **options: Any) -> Forward:
        actckpt.te.wrap(model, policy, **options)
        return per_layer(lambda layer, x: layer(x))

    return {
        "plain": lambda: per_layer(lambda layer, x: layer(x)),
        "te.checkpoint, reentrant": lambda: per_layer(te.checkpoint),
        "te.checkpoint, hooks": lambda: per_layer(lambda layer, x: te.checkpoint(layer, x, use_reentrant=False)),
        "TransformerEngine's CPU offload": te_offload,
        "actckpt checkpoint": lambda: per_layer(actckpt.te.checkpoint),
        "actckpt checkpoint, offloaded inputs": lambda: per_layer(
            lambda layer, x: actckpt.checkpoint(layer, x, offload_inputs=True)
        ),
        "actckpt offload": lambda: per_layer(offloaded),
        "actckpt policy": lambda: wrapped({"self_attention": "offload", "layernorm_mlp": "recompute"}),
        "actckpt retain_graph": lambda: wrapped("recompute", retain_graph=True),
    }


def _measure(te: Any, method: str, kind: str, layers: int, tokens: int, steps: int) -> dict[str, Any]:
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "hidden_dropout": 0.1, "attention_dropout": 0.0}
    recipe = DelayedScaling() if kind == "delayed" else None
    milliseconds, peak = [], 0
    accelerator = devices.available()
    assert accelerator is not None
    device = accelerator.device_at(0)
    try:
        gc.collect()  # the model of the method before is in cycles
        torch.accelerator.empty_cache()
        model = torch.nn.ModuleList(te.TransformerLayer(_HIDDEN, 4 * _HIDDEN, _HEADS, **options) for _ in range(layers))
        x = torch.randn(tokens, 1, _HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
        forward = _forwards(te, model)[method]()
        for _ in range(steps):
            devices.synchronize(device)
            torch.accelerator.reset_peak_memory_stats()
            start = time.perf_counter()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = forward(x)
            y.float().square().mean().backward()
            devices.synchronize(device)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            peak = torch.accelerator.max_memory_allocated()
            model.zero_grad(set_to_none=False)
    except Exception as error:  # one method's failure is a result; the others go on
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"step_ms": statistics.median(milliseconds[2:]), "all_step_ms": milliseconds, "peak_allocated_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_te.json")
    args = parser.parse_args()
    if args.layers < 3 or args.tokens < 16 or args.steps < 3:
        parser.error("--layers must be at least 3, --tokens at least 16, --steps at least 3")
    accelerator = devices.available()
    if not isinstance(accelerator, devices.Cuda):
        print("gpu_te: no CUDA device, nothing measured.")
        return 0
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        print(f"gpu_te: TransformerEngine does not load ({error}), nothing measured.")
        return 0
    end = time.monotonic() + 60 * args.minutes
    faulthandler.dump_traceback_later(60 * args.minutes + 90, exit=True)  # the file has what is known by then
    result: dict[str, Any] = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": {"gpu": accelerator.name_of(accelerator.device_at(0)), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "layers": args.layers,
        "tokens": args.tokens,
        "tests": {"exit_status": 0, "skipped": True} if args.no_tests else _run_tests(40 * args.minutes),
        "training": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for kind in ("bf16", "delayed"):
        for method in _forwards(te, torch.nn.ModuleList()):
            row: dict[str, Any] = {"skipped": "out of time"}
            if time.monotonic() < end:
                row = _measure(te, method, kind, args.layers, args.tokens, args.steps)
            result["training"][f"{kind}: {method}"] = row
            print(f"{kind}: {method}: {json.dumps(row)}", flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is known so far
    faulthandler.cancel_dump_traceback_later()
    print(f"Tests: exit status {result['tests'].get('exit_status')}. Wrote {args.out}")
    return 0 if result["tests"].get("exit_status") == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
