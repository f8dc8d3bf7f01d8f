"""Copies between device and host: a loop of pinned copies, and ours, over pinned memory and over disk."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import actckpt
from actckpt import _C, config
from actckpt._core import devices
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore
from gpu_parts.rows import Machine, Row

__all__ = ["bandwidths"]

_MIB = 1 << 20
#: Bytes that each sample copies, in at least four and at most 64 tensors.
_COPIED_BYTES = 1 << 30
_LIMIT_BYTES = 64 << 30
_TOY_BYTES = 1 << 20


def bandwidths(machine: Machine, tier: str, folder: str, mib: int) -> Row:
    """Return bytes per second of both, each way and both at once, for tensors of a size.

    Args:
        tier: `"pinned"` or `"disk"`.
        folder: of the spill file.
        mib: the size, in MiB.
    """
    copied = _TOY_BYTES if machine.is_rehearsal else _COPIED_BYTES
    repeats = max(4, min(64, copied // (mib * _MIB)))
    loop = _loop_bandwidths(machine, mib * _MIB, repeats)
    with _only(machine, tier, folder) as engine:
        ours = _our_bandwidths(machine, engine, mib * _MIB, repeats)
        if engine.stats().num_kept_full:
            raise RuntimeError(f"{engine.stats().num_kept_full} tensors stayed on the device")
    return {
        "loop": loop,
        "ours": ours,
        "share": {name: ours[name] / loop[name] for name in ours},
        "peak_allocated_bytes": torch.accelerator.max_memory_allocated(),
        "peak_reserved_bytes": torch.accelerator.max_memory_reserved(),
    }


def _loop_bandwidths(machine: Machine, nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of copies between pinned and device memory on side streams."""
    device = machine.device
    device_a, device_b = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host_a, host_b = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    out, back = torch.Stream(device), torch.Stream(device)
    devices.synchronize(device)  # these streams know nothing of the one that the tensors are made on

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
        samples = [machine.milliseconds(lambda flags=flags: copies(*flags)) for _ in range(5)]
        found[name] = nbytes * repeats * sum(flags) / statistics.median(samples) * 1e3
    return found


@contextmanager
def _only(machine: Machine, tier: str, folder: str) -> Iterator[_C.DeviceEngine]:
    """Offload GPU tensors to one tier inside the block."""
    accelerator, device = machine.accelerator, machine.device
    assert accelerator.driver_library is not None
    engine = _C.DeviceEngine.cuda(
        library=accelerator.driver_library,
        limit_bytes=_LIMIT_BYTES if tier == "pinned" else 0,
        window_bytes=config.settings().window_bytes,
        release=_C.TorchStreams(accelerator),
        spill_file=_C.SpillFile(folder) if tier == "disk" else None,
        bounce_bytes=256 * _MIB,
        num_workers=8,
    )
    before = dict(stores._stores)
    stores._stores[device.type] = config.generation, DeviceStore(engine, accelerator)
    try:
        yield engine
    finally:
        devices.synchronize(device)
        stores._stores.clear()
        stores._stores.update(before)


class _Batch:
    """Tensors that are saved by the hooks, and read again."""

    def __init__(self, device: torch.device, nbytes: int, count: int) -> None:
        self.sources = [torch.randn(nbytes // 4, device=device, requires_grad=True) * 1 for _ in range(count)]
        self.outputs: list[torch.Tensor] = []

    def save_one(self) -> None:
        with actckpt.offload(min_bytes=0):
            self.outputs.append(_KeepInput.apply(self.sources.pop()))

    def read_all(self) -> Iterator[torch.Tensor]:
        while self.outputs:
            output = self.outputs.pop()  # a function releases what it saved with its output
            yield output.grad_fn.saved_tensors[0]  # type: ignore[union-attr]


def _our_bandwidths(machine: Machine, engine: _C.DeviceEngine, nbytes: int, repeats: int) -> dict[str, float]:
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
        devices.synchronize(machine.device)
        engine.poll()  # what is still held would be handed back without a copy

    for _ in range(4):  # the first grows the pool
        first = _Batch(machine.device, nbytes, repeats)
        samples["out"].append(machine.milliseconds(lambda first=first: save(first)))
        settle()
        second = _Batch(machine.device, nbytes, repeats)

        def both(first: _Batch = first, second: _Batch = second) -> None:
            recent: deque[torch.Tensor] = deque(maxlen=4)
            for tensor in first.read_all():
                recent.append(tensor)
                second.save_one()

        samples["both"].append(machine.milliseconds(both))
        settle()
        samples["back"].append(machine.milliseconds(lambda second=second: read(second)))
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
