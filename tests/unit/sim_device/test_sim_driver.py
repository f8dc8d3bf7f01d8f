"""The driver library: what CUDA's does where the engine can tell, and faults where it is used wrongly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import driver_rig as driver
import pytest
import torch
from sim import device


@pytest.fixture
def host() -> torch.Tensor:
    return torch.zeros(8, pin_memory=True)


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(8.0, device="sim")


def test_capture_makes_queries_fail_but_in_relaxed_mode() -> None:
    stream = torch.Stream(device="sim")
    status = ctypes.c_int()
    with driver.current(0):
        event = driver.recorded(0)
        with device.capturing(stream):
            assert driver.call("cuStreamIsCapturing", device.handle_of(stream), ctypes.byref(status)) == 0
            assert status.value == 1
            assert driver.call("cuStreamIsCapturing", 0, ctypes.byref(status)) == 906
            assert driver.call("cuStreamWaitEvent", device.handle_of(stream), event, 0) == 905
            assert driver.call("cuEventQuery", event) == 900
            mode = ctypes.c_int(2)
            assert driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0
            assert driver.call("cuEventQuery", event) == 0
            assert driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0
            assert mode.value == 2


def _uses_a_destroyed_event(source: torch.Tensor, host: torch.Tensor) -> None:
    event = driver.recorded(0)
    driver.call("cuEventDestroy_v2", event)
    assert driver.call("cuStreamWaitEvent", 0, event, 0) == 400


def _uses_a_stream_of_another_device(source: torch.Tensor, host: torch.Tensor) -> None:
    with driver.current(1):
        side = driver.new_stream()
    assert driver.call("cuStreamWaitEvent", side, driver.recorded(0), 0) == 400


def _records_an_event_of_another_device(source: torch.Tensor, host: torch.Tensor) -> None:
    event = driver.recorded(0)
    with driver.current(1):
        assert driver.call("cuEventRecord", event, driver.new_stream()) == 201


def _copies_freed_memory(source: torch.Tensor, host: torch.Tensor) -> None:
    address = torch.ones(8, device="sim").data_ptr()
    driver.call("cuMemcpyDtoHAsync_v2", host.data_ptr(), address, 32, 0)


def _pins_for_one_context(source: torch.Tensor, host: torch.Tensor) -> None:
    driver.call("cuMemHostRegister_v2", 4096, 4096, 0)
    driver.call("cuMemHostUnregister", 4096)


_MISUSES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "a destroyed event": (_uses_a_destroyed_event, "an unknown event, or a destroyed one"),
    "an unknown stream": (
        lambda source, host: driver.call("cuMemcpyDtoHAsync_v2", host.data_ptr(), source.data_ptr(), 32, 12345),
        "an unknown stream, or one of another device",
    ),
    "a stream of another device": (
        _uses_a_stream_of_another_device,
        "an unknown stream, or one of another device",
    ),
    "an event of another device": (_records_an_event_of_another_device, "an event of another context"),
    "pageable memory": (
        lambda source, host: driver.copy_out(torch.zeros(8), source, 0),
        "a copy of pageable memory",
    ),
    "beyond a block": (
        lambda source, host: driver.call("cuMemcpyDtoHAsync_v2", host.data_ptr(), source.data_ptr(), 1024, 0),
        "unallocated device memory",
    ),
    "freed memory": (_copies_freed_memory, "unallocated device memory"),
    "a blocking stream": (
        lambda source, host: driver.made("cuStreamCreate", 0),
        "a stream that the default stream serialises",
    ),
    "pinned twice": (
        lambda source, host: driver.call("cuMemHostRegister_v2", host.data_ptr(), 32, 1),
        "memory that is pinned already",
    ),
    "pinned for one context": (_pins_for_one_context, "memory pinned for one context only"),
    "not pinned": (
        lambda source, host: driver.call("cuMemHostUnregister", torch.zeros(8).data_ptr()),
        "memory that is not registered",
    ),
    "events without a time": (
        lambda source, host: driver.call(
            "cuEventElapsedTime", ctypes.byref(ctypes.c_float()), driver.recorded(0), driver.recorded(0)
        ),
        "an event without a time",
    ),
}


@pytest.mark.parametrize("name", _MISUSES)
def test_wrong_use_is_a_fault(name: str, source: torch.Tensor, host: torch.Tensor) -> None:
    use, expected = _MISUSES[name]
    with driver.current(0):
        use(source, host)
    (fault,) = device.take_faults()
    assert expected in fault


def test_no_call_works_without_a_context() -> None:
    assert driver.call("cuStreamIsCapturing", 0, ctypes.byref(ctypes.c_int())) == 400
    (fault,) = device.take_faults()
    assert "no context is current" in fault
