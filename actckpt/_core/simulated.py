"""Time and memory of a device that is not there: set while a step runs on fake tensors, for the thread that runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["is_simulated", "memory_bytes", "now", "simulating"]


class _Device(threading.local):
    clock: Callable[[], float] | None = None
    memory_bytes = 0


_device = _Device()


@contextmanager
def simulating(clock: Callable[[], float], memory_bytes: int) -> Iterator[None]:
    """Run the body as on a device with this memory, whose clock returns seconds; fake tensors count as its bytes."""
    before = _device.clock, _device.memory_bytes
    _device.clock, _device.memory_bytes = clock, memory_bytes
    try:
        yield
    finally:
        _device.clock, _device.memory_bytes = before


def is_simulated() -> bool:
    """Whether this thread runs on a simulated device."""
    return _device.clock is not None


def memory_bytes() -> int:
    """Return the memory of the simulated device; 0: there is none."""
    return _device.memory_bytes


def now() -> float:
    """Return the time in seconds."""
    return time.perf_counter() if _device.clock is None else _device.clock()
