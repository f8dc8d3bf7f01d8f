"""What the tiers of device tensors promise: order of use, failures, waits that are counted, figures."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
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


def test_waits_of_streams_are_measured_on_the_device(tmp_path: Path) -> None:
    with only("pinned", tmp_path) as engine:
        backend = stores.store_for("cuda")
        ticket = backend.put(_bytes(256 * MIB), 256 * MIB)
        assert ticket is not None
        settle()
        ticket.fetch()  # nothing to hide the copy behind
        settle()
        assert 256 * MIB / 500e9 < engine.stats().stall_seconds < 1 and engine.stats().num_late >= 1


def test_a_reload_that_was_begun_early_is_no_stall(tmp_path: Path) -> None:
    with only("disk", tmp_path) as engine:
        backend = stores.store_for("cuda")
        ticket = backend.put(_bytes(8 * MIB), 8 * MIB)
        assert ticket is not None
        settle()
        assert ticket.prefetch()
        torch.cuda._sleep(1_000_000_000)
        torch.cuda.synchronize()
        num_late = engine.stats().num_late
        ticket.fetch()
        settle()
        assert engine.stats().num_prefetched == 1 and engine.stats().num_late == num_late
