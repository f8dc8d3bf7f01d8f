"""Offloading on a GPU: bandwidths, hidden copies and peak memory. Runs unattended, writes JSON as it goes.

    python benchmarks/gpu_offload.py --layers 8 --tokens 8192

Measures a loop of pinned copies beside ours from 1 to 512 MiB, each way and both at once; training steps of a
Llama-8B-shaped stack: plain, offload, torch's save_on_cpu(pin_memory=True), checkpoints of
torch and ours, ours with offloaded inputs, what keeps matmuls or attention, and half of the activations; then our
copies over disk. The hidden share is 1 - (step - step plain) / copy time, from the device's events;
the stalls are what the engine measured itself. The bounds of peaks are those of DESIGN, "The offload engine".
--rehearse runs the same at toy size on the simulated accelerator of the tests, where only copies take time.
What matters most comes first. What fails is written down as such, and the rest goes on; what --minutes leave no time
for is written down as skipped, and a part that hangs is ended with the program one minute later.
"""

import argparse
import faulthandler
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

import actckpt
from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore, record_streams

_MIB = 1 << 20


class Scale(NamedTuple):
    """How large all is."""

    sizes_mib: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    copied_mib: int = 1024
    limit_bytes: int = 64 << 30
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    min_bytes: int = 1 << 20
    #: The copies that others are compared with.
    typical_mib: int = 64


_TOY = Scale(
    (1, 2), copied_mib=1, limit_bytes=1 << 30, dim=32, heads=4, kv_heads=2, hidden=64, min_bytes=0, typical_mib=1
)
#: With `max_inflight="auto"`.
_MOST_WINDOW_BYTES = 256 * _MIB

_scale = Scale()
_ACCELERATOR = devices.available()
_DEVICE = torch.device("cpu") if _ACCELERATOR is None else _ACCELERATOR.device_at(0)

Context = Callable[[], AbstractContextManager[Any]]


class Block(torch.nn.Module):
    """A decoder block of the shape of Llama 3 8B's, without rotation."""

    def __init__(self, scale: Scale | None = None) -> None:
        super().__init__()
        scale = scale or _scale
        dim, hidden = scale.dim, scale.hidden
        self.head = dim // scale.heads
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.q, self.o = torch.nn.Linear(dim, dim, bias=False), torch.nn.Linear(dim, dim, bias=False)
        self.k = torch.nn.Linear(dim, scale.kv_heads * self.head, bias=False)
        self.v = torch.nn.Linear(dim, scale.kv_heads * self.head, bias=False)
        self.gate, self.up = torch.nn.Linear(dim, hidden, bias=False), torch.nn.Linear(dim, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shape (1, tokens, dim)."""
        h = self.attention_norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def device() -> torch.device:
    """Return the device that is measured."""
    return _DEVICE


def device_name() -> str:
    """Return what it calls itself."""
    return "none" if _ACCELERATOR is None else _ACCELERATOR.name_of(_DEVICE)


def milliseconds(work: Callable[[], None]) -> float:
    """Return how long work takes, by the events of the device."""
    start, end = torch.Event(_DEVICE, enable_timing=True), torch.Event(_DEVICE, enable_timing=True)
    devices.synchronize(_DEVICE)
    start.record()
    work()
    devices.synchronize(_DEVICE)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _loop_bandwidths(nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of copies between pinned and device memory on side streams."""
    device_a, device_b = (torch.empty(nbytes, dtype=torch.uint8, device=_DEVICE) for _ in range(2))
    host_a, host_b = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    out, back = torch.Stream(_DEVICE), torch.Stream(_DEVICE)
    devices.synchronize(_DEVICE)  # these streams know nothing of the one that the tensors are made on

    def copies(does_out: bool, does_back: bool) -> None:
        for _ in range(repeats):
            if does_out:
                with out:
                    host_a.copy_(device_a, non_blocking=True)
            if does_back:
                with back:
                    device_b.copy_(host_b, non_blocking=True)

    kinds = {"out": (True, False), "back": (False, True), "both": (True, True)}
    found = {}
    for name, flags in kinds.items():
        copies(*flags)
        samples = [milliseconds(lambda flags=flags: copies(*flags)) for _ in range(5)]
        found[name] = nbytes * repeats * sum(flags) / statistics.median(samples) * 1e3
    return found


@contextmanager
def _only(tier: str, folder: str) -> Iterator[_C.DeviceEngine]:
    """Offload GPU tensors to one tier inside the block."""
    assert _ACCELERATOR is not None and _ACCELERATOR.driver_library is not None
    engine = _C.DeviceEngine.cuda(
        library=_ACCELERATOR.driver_library,
        limit_bytes=_scale.limit_bytes if tier == "pinned" else 0,
        window_bytes=config.settings().window_bytes,
        release=partial(record_streams, _ACCELERATOR),
        spill_file=_C.SpillFile(folder) if tier == "disk" else None,
        bounce_bytes=256 * _MIB,
        num_workers=8,
    )
    before = dict(stores._stores)
    stores._stores[_DEVICE.type] = config.generation, DeviceStore(engine, _ACCELERATOR)
    try:
        yield engine
    finally:
        devices.synchronize(_DEVICE)
        stores._stores.clear()
        stores._stores.update(before)


class _Batch:
    """Tensors that are saved by the hooks, and read again."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.sources = [torch.randn(nbytes // 4, device=_DEVICE, requires_grad=True) * 1 for _ in range(count)]
        self.outputs: list[torch.Tensor] = []

    def save_one(self) -> None:
        with actckpt.offload(min_bytes=0):
            self.outputs.append(_KeepInput.apply(self.sources.pop()))

    def read_all(self) -> Iterator[torch.Tensor]:
        while self.outputs:
            output = self.outputs.pop()  # a function releases what it saved with its output
            yield output.grad_fn.saved_tensors[0]  # type: ignore[union-attr]


def _our_bandwidths(engine: _C.DeviceEngine, nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of the hooks: many tensors saved, then all read, then both at once."""
    samples: dict[str, list[float]] = {"out": [], "back": [], "both": []}

    def save(batch: _Batch) -> None:
        while batch.sources:
            batch.save_one()

    def read(batch: _Batch) -> None:
        recent: deque[torch.Tensor] = deque(maxlen=4)  # so that no reload waits for the last one's memory
        for tensor in batch.read_all():
            recent.append(tensor)

    def settle() -> None:
        devices.synchronize(_DEVICE)
        engine.poll()  # what is still held would be handed back without a copy

    for _ in range(4):  # the first grows the pool
        first = _Batch(nbytes, repeats)
        samples["out"].append(milliseconds(lambda first=first: save(first)))
        settle()
        second = _Batch(nbytes, repeats)

        def both(first: _Batch = first, second: _Batch = second) -> None:
            recent: deque[torch.Tensor] = deque(maxlen=4)
            for tensor in first.read_all():
                recent.append(tensor)
                second.save_one()

        samples["both"].append(milliseconds(both))
        settle()
        samples["back"].append(milliseconds(lambda second=second: read(second)))
        settle()
    return {
        name: nbytes * repeats * (2 if name == "both" else 1) / statistics.median(values[1:]) * 1e3
        for name, values in samples.items()
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


def _train(layers: int, tokens: int, method: str, steps: int, folder: str) -> dict[str, Any]:
    # An engine for each: host memory of one method must be gone before the next one pins its own.
    with _only("pinned", folder) if "offload" in method else nullcontext():
        return _train_steps(layers, tokens, method, steps)


def _offload() -> AbstractContextManager[Any]:
    return actckpt.offload(min_bytes=_scale.min_bytes)


_CONTEXTS: dict[str, Context] = {
    "offload": _offload,
    "save_on_cpu": lambda: save_on_cpu(pin_memory=True),
}


def _torch_checkpoint(model: torch.nn.Sequential, **options: Any) -> None:
    for block in model:
        block.forward = partial(torch_checkpoint.checkpoint, block.forward, use_reentrant=False, **options)


def _torch_selective(model: torch.nn.Sequential) -> None:
    kept = [torch.ops.aten.mm.default]
    _torch_checkpoint(model, context_fn=partial(torch_checkpoint.create_selective_checkpoint_contexts, kept))


def _half(model: torch.nn.Sequential) -> None:
    actckpt.apply(model, blocks=Block, activation_budget="50%")


#: What is done to the model before its first step.
_APPLIED: dict[str, Callable[[torch.nn.Sequential], object]] = {
    "checkpoint": lambda model: actckpt.apply(model, blocks=Block),
    "checkpoint, offloaded inputs": lambda model: actckpt.apply(model, blocks=Block, offload_inputs=True),
    "torch checkpoint": _torch_checkpoint,
    "torch selective, keeps matmuls": _torch_selective,
    "keeps matmuls": lambda model: actckpt.apply(model, "matmuls", blocks=Block),
    "keeps attention": lambda model: actckpt.apply(model, "attention", blocks=Block),
    "recompute by replay": lambda model: actckpt.apply(model, [], blocks=Block),
    "half of the activations": _half,
}

_METHODS = ("plain", "offload", "save_on_cpu", "checkpoint", "checkpoint, offloaded inputs")
#: Where there is more time.
_MORE_METHODS = tuple(name for name in _APPLIED if name not in _METHODS)


def _train_steps(layers: int, tokens: int, method: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with _DEVICE:
        model = torch.nn.Sequential(*(Block() for _ in range(layers))).bfloat16()
    x = torch.randn(1, tokens, _scale.dim, device=_DEVICE, dtype=torch.bfloat16)
    _APPLIED.get(method, lambda _: None)(model)
    context = _CONTEXTS.get(method, nullcontext)

    def step() -> None:
        with context():
            y = model(x).float().square().mean()
        y.backward()

    all_ms, before_bytes = [], 0
    actckpt.reset_stats()
    try:
        for _ in range(steps):
            torch.accelerator.reset_peak_memory_stats()
            before_bytes = torch.accelerator.memory_allocated()
            all_ms.append(milliseconds(step))
            model.zero_grad(set_to_none=False)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    figures = actckpt.stats()
    return {
        "step_ms": statistics.median(all_ms[2:]),
        "all_step_ms": all_ms,
        "fixed_bytes": before_bytes,
        "peak_allocated_bytes": torch.accelerator.max_memory_allocated(),
        "moved_bytes_per_step": figures.offloaded_bytes // steps,
        "peak_inflight_bytes": figures.peak_inflight_bytes,
        "kept_full": figures.kept_full,
        "kept_failed": figures.kept_failed,
        "stall_ms_per_step": figures.stall_seconds / steps * 1e3,
        "late_reloads": figures.late_reloads,
    }


def _copies(tier: str, folder: str, mib: int) -> dict[str, Any]:
    repeats = max(4, min(64, _scale.copied_mib // mib))
    loop = _loop_bandwidths(mib * _MIB, repeats)
    with _only(tier, folder) as engine:
        ours = _our_bandwidths(engine, mib * _MIB, repeats)
        if engine.stats().num_kept_full:
            raise RuntimeError(f"{engine.stats().num_kept_full} tensors stayed on the GPU")
    return {"loop": loop, "ours": ours, "share": {name: ours[name] / loop[name] for name in ours}}


def _bound(figures: dict[str, dict[str, Any]], tokens: int, steps: int, method: str) -> dict[str, Any]:
    """Return the peak of a method beside its bound, beyond what is there all the time."""
    training = figures[f"training, {tokens} tokens"]
    base = training["checkpoint"] if "checkpoint" in method else _train_steps(1, tokens, "plain", steps)
    row = training[method]
    if "peak_allocated_bytes" not in row or "peak_allocated_bytes" not in base:
        return {"within": None, "because": f"no peak of {method} or of what bounds it"}
    bound = base["peak_allocated_bytes"] - base["fixed_bytes"]
    if "checkpoint" not in method:  # one block, both windows, and a storage each way
        bound += 2 * (config.settings().window_bytes or _MOST_WINDOW_BYTES) + 2 * 2 * tokens * _scale.hidden
    peak = row["peak_allocated_bytes"] - row["fixed_bytes"]
    return {"peak_bytes": peak, "bound_bytes": bound, "within": peak <= bound}


def _hidden(figures: dict[str, dict[str, Any]], training: str, method: str, base: str) -> dict[str, Any]:
    """Return how much of the copies' time the step does not see."""
    copies = figures["copies, pinned"][f"{_scale.typical_mib} MiB"]
    row, base_row = figures[training][method], figures[training][base]
    missing = [name for found, name in ((copies, "loop"), (row, "step_ms"), (base_row, "step_ms")) if name not in found]
    if missing or not row["moved_bytes_per_step"]:
        return {"hidden_share": None, "because": f"no {missing[0]}" if missing else "nothing was moved"}
    loop = copies["loop"]
    copy_ms = row["moved_bytes_per_step"] * (1 / loop["out"] + 1 / loop["back"]) * 1e3
    return {"copy_ms": copy_ms, "hidden_share": 1 - (row["step_ms"] - base_row["step_ms"]) / copy_ms}


class Part(NamedTuple):
    """One figure to measure: where it is written, and how it is had."""

    section: str
    name: str
    measure: Callable[[], dict[str, Any]]


class Report:
    """Figures in a file that is written again with each of them."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self._out = out
        self._result = {**about, "figures": self.figures}

    def run(self, parts: Iterable[Part], deadline: float) -> None:
        """Measure what there is time for until `time.monotonic()` reaches `deadline`."""
        for part in parts:
            if time.monotonic() < deadline:
                self._note(part, _measured(part))
            else:
                self._note(part, {"skipped": "out of time"})

    def _note(self, part: Part, found: dict[str, Any]) -> None:
        if "failed" in found:
            self.failed.append(f"{part.section}, {part.name}")
        self.figures.setdefault(part.section, {})[part.name] = found
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self._result, indent=1) + "\n")
        print(f"{part.section}, {part.name}: {json.dumps(found)}", flush=True)


def _measured(part: Part) -> dict[str, Any]:
    """Measure, or say what went wrong: the other figures are worth having."""
    start = time.monotonic()
    try:
        found = part.measure()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    try:
        _give_back_memory()
    except Exception as error:  # after an error that the device does not recover from
        found.setdefault("failed", f"{type(error).__name__}: {error}")
    return found | {"part_seconds": round(time.monotonic() - start, 2)}


def _give_back_memory() -> None:
    gc.collect()  # models that `apply` patched are in cycles
    if _ACCELERATOR is not None:
        _ACCELERATOR.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # else torch keeps what it pinned
        if empty_host_cache is not None:
            empty_host_cache()


def plan(layers: int, all_tokens: Sequence[int], steps: int, folder: str, figures: dict[str, Any]) -> Iterator[Part]:
    """Yield all parts, those of most value first. `figures`: where they will be found, for parts made of others."""
    for mib in _scale.sizes_mib:
        yield Part("copies, pinned", f"{mib} MiB", partial(_copies, "pinned", folder, mib))
    for number, tokens in enumerate(all_tokens):
        training = f"training, {tokens} tokens"
        for method in (*_METHODS, *(_MORE_METHODS if number == 0 else ())):
            yield Part(training, method, partial(_train, layers, tokens, method, steps, folder))
        for method, base in (("offload", "plain"), ("checkpoint, offloaded inputs", "checkpoint")):
            measure = partial(_hidden, figures, training, method, base)
            yield Part(f"hidden copies, {tokens} tokens", method, measure)
            yield Part(f"bounds of peaks, {tokens} tokens", method, partial(_bound, figures, tokens, steps, method))
    for mib in _scale.sizes_mib[::3]:
        yield Part("copies, disk", f"{mib} MiB", partial(_copies, "disk", folder, mib))


def use(accelerator: Accelerator, scale: Scale) -> None:
    """Measure on the first device of an accelerator."""
    global _ACCELERATOR, _DEVICE, _scale
    _ACCELERATOR, _DEVICE, _scale = accelerator, accelerator.device_at(0), scale


def _is_in(part: Part, sections: str | None) -> bool:
    """Whether a part belongs to what was asked for. What is compared with copies needs those of one size."""
    if sections is None:
        return True
    is_training = part.section.startswith(("training", "hidden", "bounds"))
    if sections in ("copies, pinned", "copies, disk"):
        return part.section == sections
    is_typical = part.section == "copies, pinned" and part.name == f"{_scale.typical_mib} MiB"
    return is_typical or (is_training and (sections == "frontier" or part.name not in _MORE_METHODS))


def _run(args: argparse.Namespace) -> int:
    assert _ACCELERATOR is not None
    deadline = time.monotonic() + 60 * args.minutes
    faulthandler.dump_traceback_later(60 * args.minutes + 60, exit=True)  # the file has what is known by then
    about = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": {"gpu": _ACCELERATOR.name_of(_DEVICE), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "layers": args.layers,
    }
    report = Report(args.out, about)
    with tempfile.TemporaryDirectory(dir=args.spill_dir) as folder:
        all_parts = plan(args.layers, args.tokens, args.steps, folder, report.figures)
        report.run((part for part in all_parts if _is_in(part, args.sections)), deadline)
    faulthandler.cancel_dump_traceback_later()
    print(f"Wrote {args.out}" + (f"; failed: {', '.join(report.failed)}" if report.failed else ""))
    return 1 if report.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--minutes", type=float, default=8, help="begins no part after that")
    parser.add_argument(
        "--sections",
        choices=["copies, pinned", "frontier", "training", "copies, disk"],
        help="only these (default: all)",
    )
    parser.add_argument("--spill-dir", help="folder of the spill file (default: TMPDIR)")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the simulated accelerator of the tests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_offload.json")
    args = parser.parse_args()
    if args.layers < 1 or min(args.tokens) < 1 or args.steps < 3 or args.minutes <= 0:
        parser.error("--layers and --tokens must be at least 1, --steps at least 3, --minutes positive")
    if args.rehearse:
        import rehearsal

        with rehearsal.simulated():
            accelerator = devices.available()
            assert accelerator is not None
            use(accelerator, _TOY)
            return _run(args)
    if _ACCELERATOR is None:
        print("gpu_offload: no GPU, nothing measured.")
        return 0
    return _run(args)


if __name__ == "__main__":
    sys.exit(main())
