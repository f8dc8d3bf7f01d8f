"""The bytes that a block holds for backward, and its peaks, measured by running it in isolation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._budget.bandwidth import flush
from actckpt._budget.block_calls import BlockCall
from actckpt._budget.structure import is_cast_of_parameter
from actckpt._core import devices
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import storages_of, tensors_in
from actckpt.memory import LiveStorages

__all__ = ["BlockPeaks", "HeldBytes", "block_peaks", "held_bytes"]


class HeldBytes(NamedTuple):
    """What a forward holds for backward."""

    nbytes: int
    #: Of these, copies of parameters in another dtype.
    cast_bytes: int


def held_bytes(call: BlockCall) -> HeldBytes:
    """Return the bytes that a forward holds for backward, including those of compiled code."""
    with call.isolate() as run:
        casts = _Casts()
        existing = storages_of([*tensors_in((run.args, run.kwargs)), *call.block.parameters(), *call.block.buffers()])
        outside = {id(storage) for storage in existing}

        def pack(tensor: Tensor) -> Tensor:
            live.count(tensor, outside)
            return tensor.detach()

        with casts, LiveStorages() as live, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            nodes = [tensor.grad_fn for tensor in tensors_in(run.call())]
        held = HeldBytes(live.live_bytes, casts.alive_bytes())
        del nodes
        return held


class _Casts(ObservingMode):
    """Records which storages are casts of parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_cast_of_parameter(func, args):
            self._storages += map(weakref.ref, storages_of(result))
        return result

    def alive_bytes(self) -> int:
        return sum(storage.nbytes() for reference in self._storages if (storage := reference()) is not None)


class BlockPeaks(NamedTuple):
    """Peak bytes of a block in isolation, without its input and without gradients of its parameters."""

    #: Peak of a forward that keeps everything that backward needs.
    forward: int
    #: Peaks of backward: everything is kept, the block is rerun, everything is replayed.
    kept: int
    rerun: int
    replayed: int


def block_peaks(call: BlockCall, *, can_rerun: bool) -> BlockPeaks:
    """Return the peaks of a block in each mode."""
    forward, kept = _phase_peaks(call, None)
    _, replayed = _phase_peaks(call, call.in_region([]))
    rerun = _phase_peaks(call, call.in_region("recompute"))[1] if can_rerun else replayed
    return BlockPeaks(forward, kept, rerun, replayed)


def _phase_peaks(call: BlockCall, forward: Callable[..., Any] | None) -> tuple[int, int]:
    """Return the peaks of forward and backward in bytes, without finished parameter gradients.

    On a device, the first kernels of some kinds allocate permanent memory, or try variants: the lower of two runs
    counts.
    """
    device = call.structure.device
    runs = [_peak_of_run(call, forward, device) for _ in range(1 if devices.counting(device) is None else 2)]
    return min(forward for forward, _ in runs), min(backward for _, backward in runs)


def _peak_of_run(call: BlockCall, forward: Callable[..., Any] | None, device: torch.device) -> tuple[int, int]:
    """Return the peaks of forward and of backward."""
    flush(device)
    peak = _Peak(device)
    with call.isolate(forward) as run:
        for parameter in call.block.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with peak.section():
            roots = run.roots()
        forward_bytes = peak.nbytes
        # The outputs stand for their gradients, which have the same size and lifetime.
        gradients = [torch.ones_like(root) for root in roots]
        with peak.section():
            run.backward(roots, gradients)
        return forward_bytes, peak.nbytes


class _Peak:
    """The peak of sections of a run: of the allocator, which a metered cycle resets anyway, or of live storages."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._allocator, self._live = device, devices.counting(device), LiveStorages()
        self._alive_bytes = self.nbytes = 0

    @contextmanager
    def section(self) -> Iterator[None]:
        """Measure the body; what earlier sections allocated counts too."""
        if self._allocator is None:
            self._live.reset_peak()
            with self._live:
                yield
            self.nbytes = self._live.peak_bytes
            return
        base_bytes = self._allocator.reset_peak(self._device, waits=False) - self._alive_bytes
        yield
        self._alive_bytes = self._allocator.allocated_bytes(self._device) - base_bytes
        self.nbytes = self._allocator.peak_bytes(self._device) - base_bytes


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
