"""What the tiers of device tensors promise: order of use, failures, waits that are counted, figures."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

import pytest
import sim
import torch
from gpu_oracle import only, settle
from offload_oracle import deep

import actckpt
from actckpt import _C
from actckpt._offload import notices, stores

MIB = 1 << 20


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(deep(x), x)[0]


def _bytes(nbytes: int) -> _C.Bytes:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    return _C.Bytes(data.untyped_storage(), 0)


def _tensor(found: _C.Bytes) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(found.storage)


def test_pinned_then_disk_then_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_warned", set())
    actckpt.configure(host_limit=128 * MIB, spill_dir=tmp_path, disk_limit=48 * MIB)
    backend = stores.store_for("cuda")  # 32 MiB of the 128 are bounce buffers
    device = torch.device("cuda", torch.cuda.current_device())
    sources = [_bytes(8 * MIB) for _ in range(20)]
    expected = [_tensor(source).clone() for source in sources]
    tickets = []
    for source in sources:
        tickets.append(backend.put(source, 8 * MIB))
        settle()
    sources.clear()
    found = [ticket.tier if ticket is not None else "device" for ticket in tickets]
    assert found == ["pinned"] * 12 + ["disk"] * 6 + ["device"] * 2
    figures = actckpt.stats()
    assert figures.disk_bytes == 48 * MIB
    assert figures.host_bytes <= 128 * MIB
    for ticket, value in zip(tickets, expected, strict=True):
        if ticket is not None:
            assert torch.equal(_tensor(backend.fetch(ticket, 8 * MIB, device)), value)
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == len(set(messages)) >= 2, messages


def _wait_for_drains(engine: _C.DeviceEngine, nbytes: int) -> None:
    """Until a tensor as large as all buffers of its direction fits without waiting: then all are drained."""
    source = _bytes(nbytes)
    torch.cuda.synchronize()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stream = torch.cuda.current_stream().cuda_stream
        address = source.storage.data_ptr()
        ticket = engine.put(address, nbytes, torch.cuda.current_device(), stream, source, must=False)
        settle()
        if isinstance(ticket, _C.DeviceTicket):
            ticket.drop()
            return
        time.sleep(0.001)
    raise AssertionError("the workers did not empty the bounce buffers in 30 s")


def test_a_tensor_larger_than_all_bounce_buffers_comes_back(tmp_path: Path) -> None:
    with only("disk", tmp_path, bounce_bytes=16 * MIB) as engine:
        x = torch.randn(4096, 4096, device="cuda", requires_grad=True)  # 64 MiB through 8
        with actckpt.offload():
            y = (x * 1.5).sin()
        settle()
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (x * 1.5).cos() * 1.5)
        figures = engine.stats()
        assert figures.num_host_waits > 0 and figures.host_wait_seconds > 0


def test_prefer_never_waits_for_a_bounce_buffer(tmp_path: Path) -> None:
    with only("disk", tmp_path, bounce_bytes=16 * MIB) as engine:
        backend = stores.store_for("cuda")
        warm = backend.put(_bytes(MIB), MIB, must=False)
        assert warm is not None
        sources = [_bytes(4 * MIB) for _ in range(4)]
        _wait_for_drains(engine, 8 * MIB)
        time.sleep(0.1)  # for what that put itself
        num_busy = engine.stats().num_kept_busy
        ended = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        ended.record()
        tickets = [backend.put(source, 4 * MIB, must=False) for source in sources]
        assert not ended.query(), "the host waited"
        assert [ticket is None for ticket in tickets] == [False, False, True, True]
        assert (engine.stats().num_kept_busy - num_busy, engine.stats().num_host_waits) == (2, 0)


@pytest.mark.parametrize("host_limit", [0, 64 << 10, 3 * MIB])
def test_little_or_no_pinned_memory_gives_the_right_gradients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host_limit: int,
) -> None:
    monkeypatch.setattr(notices, "_warned", set())
    actckpt.configure(host_limit=host_limit, spill_dir=tmp_path)
    actckpt.reset_stats()
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    expected = _gradient(x)
    for _ in range(3):
        with actckpt.offload(min_bytes=0):
            y = deep(x)
        settle()
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    figures = actckpt.stats()
    assert figures.host_bytes <= host_limit
    assert (figures.kept_full > 0) == (host_limit == 0) and (figures.offloaded_bytes > 0) == (host_limit > 0)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("position", [0, MIB + 5, 6 * MIB])
def test_a_disk_that_fails_gives_the_right_gradients(tmp_path: Path, position: int, code: int) -> None:
    io, faults = sim.FaultyFileIo(), sim.Faults()
    faults.fail_write_at, faults.write_errno = position, code
    io.set(faults)
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    expected = _gradient(x)
    with only("disk", tmp_path, io=io.capsule) as engine:
        for _ in range(4):
            with actckpt.offload(min_bytes=0):
                y = deep(x)
            settle()
            assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        assert engine.stats().num_failed_writes > 0


def test_altered_bytes_raise_and_the_next_try_is_right(tmp_path: Path) -> None:
    io, faults = sim.FaultyFileIo(), sim.Faults()
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    expected = _gradient(x)
    with only("disk", tmp_path, io=io.capsule) as engine:
        with actckpt.offload(min_bytes=0):
            y = deep(x)
        settle()
        _wait_for_drains(engine, 16 * MIB)
        faults.alter_read_at = 77
        io.set(faults)
        with pytest.raises(_C.OffloadReadError, match="checksum"):
            torch.autograd.grad(y, x, retain_graph=True)
        io.set(sim.Faults())
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_waits_of_streams_are_measured_on_the_device(tmp_path: Path) -> None:
    with only("pinned", tmp_path) as engine:
        backend = stores.store_for("cuda")
        device = torch.device("cuda", torch.cuda.current_device())
        ticket = backend.put(_bytes(256 * MIB), 256 * MIB)
        assert ticket is not None
        settle()
        backend.fetch(ticket, 256 * MIB, device)  # nothing to hide the copy behind
        settle()
        assert 256 * MIB / 500e9 < engine.stats().stall_seconds < 1 and engine.stats().num_late >= 1


def test_a_reload_that_was_begun_early_is_no_stall(tmp_path: Path) -> None:
    with only("disk", tmp_path) as engine:
        backend = stores.store_for("cuda")
        device = torch.device("cuda", torch.cuda.current_device())
        ticket = backend.put(_bytes(8 * MIB), 8 * MIB)
        assert ticket is not None
        settle()
        assert backend.prefetch(ticket, 8 * MIB, device)
        torch.cuda._sleep(1_000_000_000)
        torch.cuda.synchronize()
        num_late = engine.stats().num_late
        backend.fetch(ticket, 8 * MIB, device)
        settle()
        assert engine.stats().num_prefetched == 1 and engine.stats().num_late == num_late
