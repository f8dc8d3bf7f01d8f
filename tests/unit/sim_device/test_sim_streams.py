"""Streams and events: kernels run in order, copies of side streams as late as events allow."""

from __future__ import annotations

import pytest
import torch
from sim import device
from sim.device.accelerator import offloading

from actckpt._core import devices

VALUES = torch.arange(8.0)


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _pinned() -> torch.Tensor:
    return torch.zeros(8, pin_memory=True)


def _late(side: torch.Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a device tensor, and a pinned one that `side` has yet to copy it to."""
    source, host = VALUES.to("sim"), _pinned()
    side.wait_stream(_current())
    with side:
        host.copy_(source, non_blocking=True)
    source.record_stream(side)
    return source, host


def test_work_of_other_streams_does_not_run_it() -> None:
    side = torch.Stream(device="sim")
    source, _ = _late(side)
    source * 2
    torch.ones(4, device="sim").sum().item()
    _current().synchronize()
    assert device.num_pending() > 0


def test_a_wait_blocks_the_stream_that_waits_and_nothing_else() -> None:
    side, third = torch.Stream(device="sim"), torch.Stream(device="sim")
    _late(side)
    third.wait_stream(side)
    assert device.num_pending() == 2  # the copy, and the wait
    with third:
        torch.ones(4, device="sim")  # a kernel behind the wait
    assert device.num_pending() == 0


def test_a_query_is_false_and_takes_a_step() -> None:
    side = torch.Stream(device="sim")
    _late(side)
    event = side.record_event()
    assert not event.query()
    assert event.query()
    assert torch.Event("sim").query()  # never recorded


def test_an_event_is_what_its_stream_had_when_it_was_recorded() -> None:
    side = torch.Stream(device="sim")
    _, first = _late(side)
    event = side.record_event()
    _, second = _late(side)
    event.synchronize()
    assert torch.equal(first, VALUES) and device.num_pending() == 1
    side.synchronize()
    assert torch.equal(second, VALUES)


def test_a_device_synchronization_ends_all_of_its_streams_and_not_those_of_others() -> None:
    side = torch.Stream(device="sim:0")
    _, host = _late(side)
    torch.accelerator.synchronize(1)
    assert device.num_pending() > 0
    torch.accelerator.synchronize(0)
    assert torch.equal(host, VALUES)


def test_copies_of_the_current_stream_are_late_too_and_in_order() -> None:
    source, host = VALUES.to("sim"), _pinned()
    host.copy_(source, non_blocking=True)
    source.view(2, 4).t()  # no kernel
    assert device.num_pending() == 1
    source.add_(1)  # behind the copy
    assert device.num_pending() == 0
    _current().synchronize()
    assert torch.equal(host, VALUES)


def test_to_the_host_without_blocking_is_pinned_and_late_as_on_cuda() -> None:
    source = VALUES.to("sim")
    found = source.to("cpu", non_blocking=True)
    assert found.is_pinned() and device.num_pending() == 1
    torch.accelerator.synchronize()
    assert torch.equal(found, VALUES)


def test_late_copies_may_change_dtype_and_layout() -> None:
    source = torch.arange(6.0).view(2, 3)
    half = source.half().t().contiguous().t().pin_memory()
    found = torch.empty(2, 3, device="sim").copy_(half, non_blocking=True)
    assert torch.equal(found.cpu(), source)
    host = torch.zeros(2, 3, dtype=torch.int32, pin_memory=True)
    host.copy_(found, non_blocking=True)
    _current().synchronize()
    assert torch.equal(host, source.int())


def test_an_adversary_runs_copies_early_and_the_same_each_time() -> None:
    def pending() -> list[int]:
        device.settle()
        device.set_adversary(3, 0.1)
        counts = []
        kind = _current().device_type
        sides = [torch.Stream(stream_id=1 + i, device_index=0, device_type=kind) for i in range(4)]
        for side in sides * 3:
            _late(side)
            counts.append(device.num_pending())
        return counts

    first = pending()
    assert first == pending() and len(set(first)) > 3


def test_handles_name_streams_and_zero_the_default_one() -> None:
    assert device.current_handle(0) == device.current_handle(1) == 0
    side = torch.Stream(device="sim:1")
    with side:
        handle = device.current_handle(1)
    assert handle != 0 and handle == device.handle_of(side) == getattr(side, "native_handle", handle)
    assert device.stream_at(handle, 1) == side
    assert device.stream_at(0, 1) == torch.sim.default_stream(1)
    with pytest.raises(RuntimeError, match="no stream with handle"):
        device.stream_at(handle, 0)


def test_capture_is_what_a_test_says() -> None:
    side = torch.Stream(device="sim")
    with device.capturing(side):
        assert device.is_capturing(side) and not torch.sim.is_current_stream_capturing()
        with side:
            assert torch.sim.is_current_stream_capturing()
        assert not hasattr(side, "is_capturing") or (side.is_capturing() and not _current().is_capturing())
    assert not device.is_capturing(side)


def test_the_link_takes_simulated_time_and_events_tell_it() -> None:
    side = torch.Stream(device="sim")
    source, host = torch.ones(1000, device="sim"), torch.zeros(1000, pin_memory=True)
    with device.timed(link_bytes_per_s=8000.0):
        begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
        begin.record(side)
        side.wait_stream(_current())
        with side:
            host.copy_(source, non_blocking=True)
        end.record(side)
        before = device.clock()
        end.synchronize()
        assert begin.elapsed_time(end) == pytest.approx(500)
        assert device.clock() - before == pytest.approx(0.5)
        device.advance(1.0)
        _current().synchronize()
        assert device.clock() - before == pytest.approx(1.5)


def test_a_host_that_asks_runs_beside_the_kernels_that_it_gave() -> None:
    side = torch.Stream(device="sim")
    source, host = torch.ones(1000, device="sim"), torch.zeros(1000, pin_memory=True)
    values = torch.ones(1000, device="sim")
    with device.timed(link_bytes_per_s=8000.0, kernel_bytes_per_s=80000.0):
        _current().synchronize()
        before = device.clock()
        side.wait_stream(_current())
        with side:
            host.copy_(source, non_blocking=True)
            copied = torch.Event("sim")
            copied.record()
        for _ in range(8):  # 0.4 s; the copy takes half a second
            assert not copied.query()
            values.mul_(2)
        for _ in range(4):
            values.mul_(2)
        assert any(copied.query() for _ in range(8))  # each one that is not late takes a step
        assert device.clock() - before < 0.7


def test_moments_are_those_of_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("sim", 1)
    with offloading(), device.timed(link_bytes_per_s=20e6, kernel_bytes_per_s=1e6):
        x = torch.ones(1 << 18, device=other)
        start = devices.moment(other)
        x * 2
        end = devices.moment(other)
        assert torch.accelerator.current_device_index() == 0
        assert isinstance(start, torch.Event) and devices.seconds_between(start, end) > 0.5
