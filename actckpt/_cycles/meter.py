"""Meters: current live bytes, and the peak since the last event of a training cycle.

NOTE [ The meter of a CPU ]

A CPU has no allocator statistics, so a dispatch mode counts live storages. It stays on the mode stack from the first
forward of a cycle to the end of its last backward. It is at the bottom of the stack: a mode that the program enters and
leaves in between pops itself, not the meter.

A mode cannot be popped inside backward: the engine restores the stack after each hook and each callback. Nor inside
`inference_mode`, which restores the flag for active modes at its end. A meter that ends there stops counting. `sweep`
removes it elsewhere: at the next forward of a model with a budget, at the next optimizer step, when the budget is
removed, and when its thread ends.

The meter sees operators of its own thread and of the engine threads that serve it. It does not count storages that
compiled code allocates inside, workspaces of kernels, and storages of other threads. Checksums of audits do not count
either; they take up to 512 KiB in audited cycles.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actckpt._core import devices, torch_private
from actckpt._core.storages import storages_of
from actckpt._cycles.allocator_meter import AllocatorMeter, Older
from actckpt.memory import LiveStorages

__all__ = ["Meter", "meter_of", "sweep"]


class Meter(Protocol):
    """Meters the bytes of one cycle."""

    @property
    def is_counting(self) -> bool:
        """Whether it has started and not ended."""

    @property
    def live_bytes(self) -> int:
        """The live bytes, from any base."""

    def take(self) -> tuple[int, int]:
        """Return the live bytes, and the peak since the last call."""

    def muted(self) -> contextlib.AbstractContextManager[object]:
        """Do not count what runs inside, which must free everything that it allocates."""

    def unmuted(self) -> contextlib.AbstractContextManager[object]:
        """Count inside of `muted`: the part of a profile that belongs to the step."""

    def end(self) -> None:
        """Stop counting."""

    def left_bytes(self, counted: list[torch.Tensor]) -> int:
        """Return the bytes it counted that are still alive, without these tensors. Called once it has ended."""


def meter_of(
    device: torch.device, held: list[torch.Tensor], *, parameters: list[torch.nn.Parameter], older: Sequence[Older] = ()
) -> Meter:
    """Return a meter that counts from now on.

    Args:
        device: of the model.
        held: existing tensors that count while they are alive: gradients, which the program may free.
        parameters: leaves whose accumulated gradients do not count; empty if they do.
        older: storages from before that do not count and may die in the cycle.
    """
    allocator = devices.counting(device)
    if allocator is None:
        return _ModeMeter(held, parameters)
    return AllocatorMeter(allocator, device, parameters, older)


class _ModeMeter(LiveStorages):
    """Counts live storages below all other modes of the thread (NOTE [ The meter of a CPU ])."""

    def __init__(self, held: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters=parameters, device="cpu")
        self._num_muted = 0
        for storage in storages_of(held):
            self._note_output(storage, is_new=True)
        above = [torch_private.pop_mode() for _ in range(torch_private.num_dispatch_modes())]
        self.__enter__()
        _of_thread.entered.meters.append(self)
        for mode in reversed(above):
            torch_private.push_mode(mode)
        self.is_counting = True
        _sweep_before_updates()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_counting:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_output(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        if not self._num_muted:
            super()._note_output(storage, is_new=is_new)

    def left_bytes(self, counted: list[torch.Tensor]) -> int:
        known = [storage for storage in storages_of(counted) if self._entry(storage) is not None]
        return self.live_bytes - sum(storage.nbytes() for storage in known)

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

    def _leave_stack(self, *exc_info: Any) -> None:
        if not torch.is_inference_mode_enabled():
            super()._leave_stack(*exc_info)

    def end(self) -> None:
        if self.is_counting:
            self.is_counting = False
            self.__exit__(None, None, None)
            self._parameters = ()  # the meter may outlive them


class _Entered:
    """Meters on the mode stack of one thread. Those that ended inside a backward may still be on it."""

    def __init__(self) -> None:
        self.meters: list[_ModeMeter] = []

    def sweep(self) -> None:
        if torch.is_inference_mode_enabled():
            return
        ended = [meter for meter in self.meters if not meter.is_counting]
        self.meters = [meter for meter in self.meters if meter.is_counting]
        for meter in ended:
            torch_private.remove_dispatch_mode(meter)

    def __del__(self) -> None:
        # The thread ends. torch would take the interpreter lock to free what is on the stack. If the interpreter has
        # been finalized meanwhile, the process aborts.
        if not sys.is_finalizing():
            for meter in self.meters:
                torch_private.remove_dispatch_mode(meter)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.entered = _Entered()


_of_thread = _OfThread()
_is_sweeping_before_updates = False


def sweep(*_: object) -> None:
    """Remove meters that ended inside a backward from the mode stack. Must be called outside of backward."""
    _of_thread.entered.sweep()


def _sweep_before_updates() -> None:
    """Sweep before each optimizer step: in most programs it follows backward."""
    global _is_sweeping_before_updates
    if not _is_sweeping_before_updates:
        _is_sweeping_before_updates = True
        register_optimizer_step_pre_hook(sweep)
