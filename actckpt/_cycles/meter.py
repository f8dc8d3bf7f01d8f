"""Meters: bytes alive now, and the peak since the last event of a training cycle.

NOTE [ The meter of a CPU ]

1. A CPU has no allocator that counts, so a dispatch mode counts live storages. It stays on the mode stack from the
   first forward of a cycle to the end of its last backward, and sits at the bottom of the stack: a mode that the
   program enters and leaves in between pops itself, not the meter.
2. A mode cannot be popped inside backward: the engine restores the stack after each hook and each callback. A meter
   that ends there counts nothing more; `sweep` removes it where no backward runs: at the next forward of a model with a
   budget, at the next step of an optimizer, and when the budget is removed.
3. Checksums of audits are not counted. They take up to 512 KiB in cycles that are audited.
4. The meter sees operators of its own thread and of the engine's threads that serve it. Storages that compiled code
   allocates inside, workspaces of kernels and storages of other threads are not counted.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actckpt._blocks.outside import MadeStorages
from actckpt._core import devices, torch_private
from actckpt._core.storages import storages_of
from actckpt._replay import checksums
from actckpt.memory import LiveStorages

__all__ = ["Meter", "RisenPeak", "meter_of", "sweep"]


class Meter(Protocol):
    """Counts the bytes of one cycle."""

    @property
    def is_counting(self) -> bool:
        """Whether it has begun and not ended."""

    def take(self) -> tuple[int, int]:
        """Return the bytes alive now, and the peak since the last call."""

    def muted(self) -> contextlib.AbstractContextManager[object]:
        """Leave out what runs inside, which frees all that it allocates."""

    def unmuted(self) -> contextlib.AbstractContextManager[object]:
        """Count inside of `muted`: the part of a profile that belongs to the step."""

    def end(self) -> None:
        """Count nothing more."""

    def left_bytes(self, gradients: list[torch.Tensor]) -> int:
        """Return the bytes alive now of what it counted, but for these tensors. Called once it has ended."""

    def storages(self) -> MadeStorages | None:
        """Return the storages that it counts, in the order of their making; None where it counts bytes alone."""


def meter_of(device: torch.device, held: list[torch.Tensor], *, parameters: list[torch.nn.Parameter]) -> Meter:
    """Return a meter that counts from now on.

    Args:
        device: of the model.
        held: tensors that exist already and count while they live: gradients, which the program may free.
        parameters: leaves whose accumulated gradients do not count; empty where they do.
    """
    allocator = devices.counting(device)
    if allocator is None:
        return _ModeMeter(held, parameters)
    return _AllocatorMeter(allocator, device, parameters)


class _ModeMeter(LiveStorages):
    """Counts live storages below all other modes of the thread (NOTE [ The meter of a CPU ])."""

    def __init__(self, held: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters=parameters, device="cpu")
        self._num_muted, self.num_made = 0, 0
        self._orders = dict[int, int]()
        for storage in storages_of(held):
            self._note_output(storage, is_new=True)
        above = [torch_private.pop_mode() for _ in range(torch_private.num_dispatch_modes())]
        self.__enter__()
        for mode in reversed(above):
            torch_private.push_mode(mode)
        self.is_counting = True
        _sweep_before_updates()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_counting:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_output(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        if self._num_muted or checksums.is_running():
            return
        is_known = self._entry(storage) is not None
        super()._note_output(storage, is_new=is_new)
        if not is_known:
            self._orders[id(storage)] = self.num_made
            self.num_made += 1

    def storages(self) -> MadeStorages:
        return self

    def left_bytes(self, gradients: list[torch.Tensor]) -> int:
        known = [storage for storage in storages_of(gradients) if self._entry(storage) is not None]
        return self.live_bytes - sum(storage.nbytes() for storage in known)

    def has_made(self, storage: torch.UntypedStorage, *, since: int) -> bool:
        """Return whether a storage was made after so many others."""
        with self._lock:
            return self._entry(storage) is not None and self._orders[id(storage)] >= since

    def made_by(self) -> Callable[[int], int]:
        """Return a function: of what is alive, the bytes that were there when so many storages had been made."""
        with self._lock:
            self._count_deaths()
            rows = [(self._orders[key], each.nbytes) for key, each in self._entries.items() if not each.is_gradient]
        rows.sort()
        orders = [order for order, _ in rows]
        sums = [*itertools.accumulate((nbytes for _, nbytes in rows), initial=0)]
        return lambda number: sums[bisect.bisect_left(orders, number)]

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        self._num_muted += 1
        try:
            yield
        finally:
            self._num_muted -= 1

    @contextlib.contextmanager
    def unmuted(self) -> Iterator[None]:
        """Count inside of `muted`: the part of a profile that belongs to the step."""
        num, self._num_muted = self._num_muted, 0
        try:
            yield
        finally:
            self._num_muted = num

    def take(self) -> tuple[int, int]:
        live_bytes, peak_bytes = self.live_bytes, self.peak_bytes
        self.reset_peak()
        return live_bytes, max(live_bytes, peak_bytes)

    def end(self) -> None:
        if self.is_counting:
            self.is_counting = False
            self.__exit__(None, None, None)
            self._parameters = ()  # it may outlive them
            _ended.append(self)


#: Meters that have ended, and may be on the stack still.
_ended: list[_ModeMeter] = []
_is_sweeping_before_updates = False


def sweep(*_: object) -> None:
    """Remove meters from the mode stack that ended inside of a backward. Call it where no backward runs."""
    while _ended:
        torch_private.remove_dispatch_mode(_ended.pop())


def _sweep_before_updates() -> None:
    """Sweep before each step of an optimizer: in most programs it is what runs after backward."""
    global _is_sweeping_before_updates
    if not _is_sweeping_before_updates:
        _is_sweeping_before_updates = True
        register_optimizer_step_pre_hook(sweep)


class _AllocatorMeter:
    """Asks the caching allocator of a device, and resets its peak at each event of a metered cycle."""

    def __init__(
        self, allocator: devices.Accelerator, device: torch.device, parameters: list[torch.nn.Parameter]
    ) -> None:
        self._allocator, self._device = allocator, device
        self._without_gradient = {id(each) for each in parameters if each.grad is None}
        #: Of gradients that were accumulated in this cycle: by now, and by the last event.
        self._gradient_bytes = self._noted_gradient_bytes = 0
        self._peak_bytes, self._is_muted = 0, False
        self._hooks = [each.register_post_accumulate_grad_hook(self._accumulated) for each in parameters]
        self._base_bytes = allocator.reset_peak(device, waits=False)
        self.is_counting = True
        checksums.around.append(self.muted)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._without_gradient:
            self._without_gradient.remove(id(parameter))
            self._gradient_bytes += _bytes_of([parameter.grad])

    def take(self) -> tuple[int, int]:
        # Gradients that were accumulated since the last event are not taken off the peak, which may come before them.
        peak_bytes = self._peak_until_now() - self._base_bytes - self._noted_gradient_bytes
        self._peak_bytes, self._noted_gradient_bytes = 0, self._gradient_bytes
        live_bytes = self._allocator.reset_peak(self._device, waits=False) - self._base_bytes - self._gradient_bytes
        return live_bytes, max(live_bytes, peak_bytes)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        if self._is_muted:  # audits of what runs inside
            yield
            return
        self._is_muted, self._peak_bytes = True, self._peak_until_now()
        try:
            yield
        finally:
            self._allocator.reset_peak(self._device, waits=False)
            self._is_muted = False

    @contextlib.contextmanager
    def unmuted(self) -> Iterator[None]:
        self._allocator.reset_peak(self._device, waits=False)
        self._is_muted = False
        try:
            yield
        finally:
            self._is_muted, self._peak_bytes = True, self._peak_until_now()

    def _peak_until_now(self) -> int:
        return max(self._peak_bytes, self._allocator.peak_bytes(self._device))

    def storages(self) -> None:
        return None

    def left_bytes(self, gradients: list[torch.Tensor]) -> int:
        return 0  # what is allocated counts already

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.is_counting:
            self.is_counting = False
            checksums.around.remove(self.muted)


def gradient_bytes(parameters: list[torch.nn.Parameter]) -> int:
    """Return the bytes of the gradients of parameters."""
    return _bytes_of([each.grad for each in parameters])


def _bytes_of(tensors: list[torch.Tensor | None]) -> int:
    return sum(storage.nbytes() for storage in storages_of([each for each in tensors if each is not None]))


class RisenPeak:
    """Whether the peak of a device's allocator rises in a cycle without a meter. It does not start the peak again.

    Args:
        parameters: leaves whose accumulated gradients do not count; empty where they do.
    """

    def __init__(self, device: torch.device, parameters: list[torch.nn.Parameter]) -> None:
        self._allocator, self._device, self._parameters = devices.counting(device), device, parameters
        if self._allocator is not None:
            self._peak_bytes = self._allocator.peak_bytes(device)
            self._base_bytes = self._allocator.allocated_bytes(device) - gradient_bytes(parameters)

    def bytes_over_begin(self) -> int:
        """Return how far the peak is above what there was at the begin; 0 where an older peak is higher."""
        if self._allocator is None:
            return 0
        peak_bytes = self._allocator.peak_bytes(self._device)
        return peak_bytes - self._base_bytes - gradient_bytes(self._parameters) if peak_bytes > self._peak_bytes else 0
