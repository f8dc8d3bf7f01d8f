"""The meter of a device: its caching allocator.

NOTE [ The meter of a device ]

A metered cycle resets the allocator's peak at each event, without waiting for the device. All meters and watches of the
device read the peak before that.

Memory from before a cycle that dies during the cycle would look like memory that the cycle frees. So garbage is
collected before a cycle is measured, and the device's autograd thread first frees the graph of the last backward. Bytes
being copied to a store count as freed. The bytes of earlier outputs are added once these are gone. If less is alive
than when the cycle started, the cycle counts from there.

Profiling runs inside the step, and checksums of audits, do not count. In cycles without a meter, the peak is read when
the model's forward ends and when the cycle ends. An older, higher peak hides theirs: it is reset in one of 64 cycles.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from actckpt._C import Paused
from actckpt._core import checksums, devices, torch_private
from actckpt._core.storages import storages_of
from actckpt._offload import stores

__all__ = ["AllocatorMeter", "Older", "RisenPeak", "free_older"]

#: A storage from before the cycle, and its bytes.
Older = tuple[weakref.ref[torch.UntypedStorage], int]


class _Observer:
    """An object that reads the peak of a device.

    Args:
        parameters: leaves whose accumulated gradients do not count; empty if they do.
        older: storages whose bytes count as alive, even once they are gone.
    """

    def __init__(
        self,
        allocator: devices.Accelerator,
        device: torch.device,
        parameters: list[torch.nn.Parameter],
        older: Iterable[Older],
    ) -> None:
        self.allocator, self.device = allocator, device
        self._parameters, self._older = parameters, tuple(older)

    def see(self) -> None:
        """Read the part of the current peak that the cycle caused."""
        raise NotImplementedError

    def started_again(self) -> None:
        """The allocator's peak was reset to the live bytes."""

    def _gone_bytes(self) -> int:
        return sum(nbytes for storage, nbytes in self._older if storage() is None)

    def begin(self) -> None:
        """Start observing, until `finish` or until this object dies."""
        key = id(self)
        _observers[key] = weakref.ref(self, lambda _: _observers.pop(key, None))

    def finish(self) -> None:
        """Stop observing."""
        _observers.pop(id(self), None)


#: Active observers. Threads add and remove some while others read.
_observers: dict[int, weakref.ref[_Observer]] = {}


def _observers_of(device: torch.device) -> list[_Observer]:
    observers = [ref() for ref in list(_observers.values())]
    return [observer for observer in observers if observer is not None and observer.device == device]


def _see(device: torch.device) -> None:
    for observer in _observers_of(device):
        observer.see()


def _start_again(allocator: devices.Accelerator, device: torch.device) -> int:
    """Reset the peak; return the live bytes."""
    live_bytes = allocator.reset_peak(device, waits=False)
    for observer in _observers_of(device):
        observer.started_again()
    return live_bytes


class AllocatorMeter(_Observer):
    """Meters a cycle (NOTE [ The meter of a device ]). See `_Observer` for the arguments."""

    def __init__(
        self,
        allocator: devices.Accelerator,
        device: torch.device,
        parameters: list[torch.nn.Parameter],
        older: Iterable[Older],
    ) -> None:
        super().__init__(allocator, device, parameters, older)
        self._without_gradient = {id(parameter) for parameter in parameters if parameter.grad is None}
        #: Bytes of gradients accumulated in this cycle: now, and at the last event.
        self._gradient_bytes = self._noted_gradient_bytes = 0
        #: The peak since the last event, and the nesting depth of `muted`.
        self._peak_bytes = self._num_muted = 0
        # Autograd holds these where no garbage collector sees them, and the meter holds the parameters.
        accumulated = weakref.WeakMethod(self._accumulated)
        self._hooks = [parameter.register_post_accumulate_grad_hook(_calling(accumulated)) for parameter in parameters]
        _see(device)
        inflight_bytes = stores.inflight_bytes(device)  # first: the call releases finished copies
        self._base_bytes = _start_again(allocator, device) - inflight_bytes
        self.is_counting = True
        self.begin()
        checksums.leave_out(self.muted, is_metered=True)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._without_gradient:
            self._without_gradient.remove(id(parameter))
            self._gradient_bytes += _bytes_of([parameter.grad])

    def see(self) -> None:
        if not self._num_muted:
            self._peak_bytes = max(self._peak_bytes, self.allocator.peak_bytes(self.device))

    @property
    def live_bytes(self) -> int:
        return self.allocator.allocated_bytes(self.device)

    def take(self) -> tuple[int, int]:
        _see(self.device)
        live_bytes = _start_again(self.allocator, self.device)
        # Allocations and frees since the last event may lie before or after the peak: assume the worse case.
        added_bytes = self._gone_bytes() - self._base_bytes
        peak_bytes = self._peak_bytes + added_bytes - self._noted_gradient_bytes
        self._peak_bytes, self._noted_gradient_bytes = 0, self._gradient_bytes
        live_bytes += added_bytes - self._gradient_bytes
        if live_bytes < 0:  # memory from before the cycle died unnoticed by weak references
            self._base_bytes += live_bytes
            live_bytes = 0
        return live_bytes, max(live_bytes, peak_bytes)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Do not count what runs inside; audits inside of it enter this again."""
        if not self._num_muted:
            _see(self.device)
        self._num_muted += 1
        try:
            yield
        finally:
            if self._num_muted == 1:
                _start_again(self.allocator, self.device)
            self._num_muted -= 1

    @contextlib.contextmanager
    def unmuted(self) -> Iterator[None]:
        """Count inside of `muted`."""
        _start_again(self.allocator, self.device)
        num, self._num_muted = self._num_muted, 0
        try:
            yield
        finally:
            _see(self.device)
            self._num_muted = num

    def left_bytes(self, counted: list[torch.Tensor]) -> int:
        return 0  # the allocator counts it already

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.is_counting:
            self.is_counting = False
            self.finish()
            checksums.count_again(self.muted)


class RisenPeak(_Observer):
    """Whether the peak rises in a cycle without a meter. See `_Observer` for the arguments.

    Args:
        starts_again: reset the peak now; otherwise an older, higher one hides that of the cycle.
    """

    def __init__(
        self,
        allocator: devices.Accelerator,
        device: torch.device,
        parameters: list[torch.nn.Parameter],
        older: Iterable[Older],
        *,
        starts_again: bool,
    ) -> None:
        super().__init__(allocator, device, parameters, older)
        if starts_again:
            _see(device)
            _start_again(allocator, device)
        inflight_bytes = stores.inflight_bytes(device)  # first: the call releases finished copies
        self._base_bytes = allocator.allocated_bytes(device) - inflight_bytes - self._bytes_of_gradients()
        self._known_bytes, self._most_bytes = allocator.peak_bytes(device), 0
        self.begin()
        checksums.leave_out(self._ignored, is_metered=False)

    def see(self) -> None:
        peak_bytes = self.allocator.peak_bytes(self.device)
        if peak_bytes > self._known_bytes:
            more_bytes = self._gone_bytes() - self._base_bytes - self._bytes_of_gradients()
            self._known_bytes, self._most_bytes = peak_bytes, max(self._most_bytes, peak_bytes + more_bytes)

    def started_again(self) -> None:
        self._known_bytes = 0

    @contextlib.contextmanager
    def _ignored(self) -> Iterator[None]:
        self.see()
        try:
            yield
        finally:
            self._known_bytes = max(self._known_bytes, self.allocator.peak_bytes(self.device))

    def _bytes_of_gradients(self) -> int:
        return _bytes_of([parameter.grad for parameter in self._parameters])

    def end(self) -> int:
        """Return how far the peak was above the bytes at the start; 0 if an older peak was higher."""
        self.see()
        self.finish()
        checksums.count_again(self._ignored)
        return self._most_bytes


def free_older(device: torch.device, *, collects_garbage: bool) -> None:
    """Free memory of earlier cycles that garbage and the device's autograd thread hold. Does nothing for a CPU.

    That thread frees a graph shortly after its backward, and before it takes the next one. So this runs an empty
    backward.
    """
    if devices.counting(device) is None or torch_private.current_graph_task_id() != -1:
        return
    with Paused(), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing.view(0), nothing, nothing.detach())
    if collects_garbage:
        gc.collect()


def _calling(method: weakref.WeakMethod[Any]) -> Callable[[torch.Tensor], None]:
    def hook(tensor: torch.Tensor) -> None:
        bound = method()
        if bound is not None:
            bound(tensor)

    return hook


def _bytes_of(tensors: list[torch.Tensor | None]) -> int:
    return sum(storage.nbytes() for storage in storages_of([tensor for tensor in tensors if tensor is not None]))
