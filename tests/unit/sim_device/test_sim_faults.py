"""Programs that are wrong are caught, whatever order their work happened to run in, and right ones are not.

Each wrong program leaves out one thing of a right one. None of them needs luck: kernels run at launch and see right
values, and what is judged is what the program ordered.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import driver_rig as driver
import pytest
import torch
from sim import device
from torch import Tensor


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _pinned(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, pin_memory=True)


def write_out(leave_out: str) -> None:
    """A copy to the host on a side stream, and one back on another."""
    out, back = (torch.Stream(device="sim") for _ in range(2))
    source = torch.arange(1024.0, device="sim") * 2
    host = _pinned(source)
    if leave_out != "write-out waits for the kernel":
        out.wait_stream(_current())
    with out:
        host.copy_(source, non_blocking=True)
    if leave_out != "record_stream of the source":
        source.record_stream(out)
    del source
    target = torch.empty(1024, device="sim")
    if leave_out != "reload waits for the allocation":
        back.wait_stream(_current())
    if leave_out != "reload waits for the write-out":
        back.wait_stream(out)
    with back:
        target.copy_(host, non_blocking=True)
    if leave_out != "consumer waits for the reload":
        _current().wait_stream(back)
    target * 2


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 0.99])
@pytest.mark.parametrize(
    ("leave_out", "operations"),
    [
        ("nothing", None),
        ("write-out waits for the kernel", ("a copy to pinned memory", "mul")),
        ("record_stream of the source", ("a free", "a copy to pinned memory")),
        ("reload waits for the allocation", ("a copy from pinned memory", "an allocation")),
        ("reload waits for the write-out", ("a copy from pinned memory", "a copy to pinned memory")),
        ("consumer waits for the reload", ("mul", "a copy from pinned memory")),
    ],
)
def test_leaving_out_any_order_is_caught(leave_out: str, operations: tuple[str, str] | None, eagerness: float) -> None:
    device.set_adversary(1, eagerness)
    with device.judging_frees():
        write_out(leave_out)
    faults = device.take_faults()
    assert bool(faults) == (operations is not None)
    if operations is not None:
        fault = faults[0]
        assert fault.startswith(operations[0]) and f"that {operations[1]} on" in fault and "nothing orders" in fault


def test_a_write_that_does_not_wait_for_a_read_is_caught() -> None:
    side = torch.Stream(device="sim")
    values = torch.ones(1024, device="sim")
    side.wait_stream(_current())
    with side:
        kept = values * 2
    values.add_(1)
    (fault,) = device.take_faults()
    assert fault.startswith("add_ on sim:0, stream 0 writes 4096 bytes that mul on sim:0") and "reads" in fault
    _current().wait_stream(side)
    del kept


def test_kernels_of_two_streams_on_parts_of_a_tensor_are_not_a_fault() -> None:
    side = torch.Stream(device="sim")
    values = torch.zeros(16, 1024, device="sim")
    side.wait_stream(_current())
    left, right = values.chunk(2, 1)
    with side:
        left.add_(1)
    right.add_(2)
    assert device.take_faults() == []
    with side:
        values.add_(1)
    assert len(device.take_faults()) == 1
    _current().wait_stream(side)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_goes_to_another_tensor_too_early_is_caught(waits: bool) -> None:
    side = torch.Stream(device="sim")
    with side:
        first = torch.ones(1024, device="sim")
    _current().wait_stream(side)
    first * 2
    del first  # from now on its own stream may use the memory
    if waits:
        side.wait_stream(_current())
    with side:
        torch.empty(1024, device="sim")
    faults = device.take_faults()
    assert len(faults) == (0 if waits else 1)
    assert waits or (faults[0].startswith("an allocation on sim:0") and "mul" in faults[0])


@pytest.mark.parametrize(
    "touch", [lambda host: host[3].item(), lambda host: host.zero_(), lambda host: host.numpy().sum()]
)
def test_a_host_that_touches_what_is_being_written_is_caught(touch: Callable[[Tensor], Any]) -> None:
    source = torch.ones(1024, device="sim")
    host = _pinned(source)
    host.copy_(source, non_blocking=True)
    touch(host)
    (fault,) = device.take_faults()
    assert fault.startswith("the host touches pinned memory that a copy to pinned memory on sim:0, stream 0 writes")


def test_so_it_is_when_the_copy_has_run_and_nobody_told_the_host() -> None:
    source = torch.ones(1024, device="sim")
    host = _pinned(source)
    host.copy_(source, non_blocking=True)
    source.add_(1)  # runs the copy
    assert device.num_pending() == 0
    host.sum()
    assert len(device.take_faults()) == 1


def test_a_host_that_writes_what_is_being_read_is_caught_and_reading_is_not() -> None:
    host = torch.ones(1024).pin_memory()
    target = host.to("sim", non_blocking=True)
    assert host.sum().item() == 1024
    assert device.take_faults() == []
    host.add_(1)
    assert "from pinned memory on sim:0, stream 0 reads" in device.take_faults()[0]
    del target


def test_registered_memory_is_watched_too() -> None:
    source = torch.ones(1024, device="sim")
    with mmap.mmap(-1, 4096) as slab, driver.current(0):
        host = torch.frombuffer(slab, dtype=torch.float32)
        assert driver.call("cuMemHostRegister_v2", host.data_ptr(), 4096, 1) == 0
        driver.copy_out(host, source, 0)
        host.sum()
        assert "cuMemcpyDtoHAsync" in device.take_faults()[0]
        driver.copy_out(host, source, 0)
        assert driver.call("cuMemHostUnregister", host.data_ptr()) == 0
        assert "is unregistered that cuMemcpyDtoHAsync" in device.take_faults()[0]
        assert host.sum().item() == 1024
        del host


def test_pinned_memory_freed_under_a_copy_that_torch_does_not_know_is_caught() -> None:
    source = torch.ones(1024, device="sim")
    host = _pinned(source)
    with driver.current(0):
        driver.copy_out(host, source, 0)
    del host
    assert "pinned memory is freed that cuMemcpyDtoHAsync" in device.take_faults()[0]
