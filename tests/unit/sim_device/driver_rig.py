"""The driver library of the simulated device, called as the engine calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sim import device

_library = ctypes.CDLL(device.library_path)
WITHOUT_TIME = 2


def call(name: str, *arguments: object) -> int:
    """Call a function of the driver; integers are passed as 64 bits, as addresses and sizes are."""
    converted = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments]
    return int(getattr(_library, name)(*converted))


def made(name: str, *arguments: object) -> int:
    """Call a function that writes a handle, and return the handle."""
    handle = ctypes.c_void_p()
    assert call(name, ctypes.byref(handle), *arguments) == 0
    return handle.value or 0


@contextmanager
def current(index: int) -> Iterator[None]:
    """Let a device's primary context be current."""
    number = ctypes.c_int()
    assert call("cuDeviceGet", ctypes.byref(number), index) == 0
    assert call("cuCtxPushCurrent_v2", made("cuDevicePrimaryCtxRetain", number.value)) == 0
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def new_stream() -> int:
    return made("cuStreamCreate", 1)


def recorded(stream: int) -> int:
    """Return an event recorded on a stream."""
    event = made("cuEventCreate", WITHOUT_TIME)
    assert call("cuEventRecord", event, stream) == 0
    return event


def wait(stream: int, event: int) -> None:
    assert call("cuStreamWaitEvent", stream, event, 0) == 0


def copy_out(host: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    assert call("cuMemcpyDtoHAsync_v2", host.data_ptr(), source.data_ptr(), source.nbytes, stream) == 0
