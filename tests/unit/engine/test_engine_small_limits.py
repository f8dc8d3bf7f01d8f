"""Limits of pinned memory down to none: tensors pass through small buffers, or stay, and there is one warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sim
import torch

from actckpt import _C, config
from actckpt._core import devices
from actckpt._offload import limits, notices, spill
from actckpt._offload.device import DeviceStore

PAGE, MIB = 4096, 1 << 20


@pytest.mark.parametrize("host", [*(n * PAGE for n in range(70)), *(n * MIB + 5 for n in (1, 31, 32, 255, 256, 9999))])
def test_bounce_buffers_are_whole_pages_within_a_quarter_of_the_limit(host: int) -> None:
    bounce, buffer = limits.bounce_sizes(host)
    assert buffer % PAGE == 0 and bounce % (2 * buffer) == 0
    assert bounce <= min(host // 4, 64 * MIB) and buffer <= 4 * MIB
    assert (bounce > 0) == (host >= 8 * PAGE)


def test_large_limits_have_eight_buffers_of_four_mib_for_each_direction() -> None:
    assert limits.bounce_sizes(64 << 30) == (64 * MIB, 4 * MIB)
    assert limits.bounce_sizes(16 * MIB) == (4 * MIB, MIB // 2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[sim.MockCuda]:
    """A mock of the driver under `CudaBackend.from_settings`."""
    mock = sim.MockCuda()

    def engine(*, library: str, num_workers: int, release: Any, **options: Any) -> _C.DeviceEngine:
        assert library == sim.OneStream.driver_library
        return mock.engine(release=lambda keep, uses: None, **options)

    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(spill, "_files", {})  # other tests may have opened one, with another limit
    monkeypatch.setattr(_C, "DeviceEngine", SimpleNamespace(cuda=engine))
    monkeypatch.setitem(devices._accelerators, "cuda", sim.OneStream("cuda"))
    yield mock
    assert mock.faults == []


def _address(number: int) -> int:
    """Return where a stretch of the mock's device begins."""
    return (1 << 60) + number * (64 << 20)


def _source(number: int) -> _C.Bytes:
    storage: Any = SimpleNamespace(data_ptr=lambda: _address(number), device=torch.device("cuda", 0))
    return _C.Bytes(storage, 0)


def _put_all(mock: sim.MockCuda, settings: config.Settings, count: int, nbytes: int) -> tuple[list[str], Any]:
    """Put tensors one after the other; return where each went, and the store."""
    store = DeviceStore.from_settings(settings, "cuda")
    places, tickets = [], []
    for number in range(count):
        ticket = store.put(_source(number), nbytes)
        assert ticket is None or isinstance(ticket, _C.EngineTicket)
        places.append("device" if ticket is None else ticket.inner.tier)
        tickets.append(ticket)
        for _ in range(8):
            mock.drain()
            store.engine._work()
            store.engine.poll()
        held = store.engine.pool_stats().pool_bytes + store.engine.stats().bounce_bytes
        assert held <= (settings.host_limit or 0), "never more pinned than allowed"
    for number, ticket in enumerate(tickets):
        if ticket is not None:
            buffer = object()
            assert ticket.inner.load(0, 0, _address(100 + number), buffer, urgent=True)
            assert ticket.inner.get(0, 0) == (buffer, False)
    return places, store


@pytest.mark.parametrize("host", [8 * PAGE, 9 * PAGE, 100 * PAGE, 1 * MIB, 16 * MIB, 31 * MIB])
def test_small_limits_pass_tensors_on_to_disk(
    cuda: sim.MockCuda, folder: str, host: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(config.settings(), host_limit=host, spill_dir=folder, disk_limit=80 * MIB)
    places, _ = _put_all(cuda, settings, 3, 40 * MIB)
    assert places == ["disk", "disk", "device"]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 2 and "No store has room" in messages[-1]


@pytest.mark.parametrize("host", [0, 1, PAGE, 8 * PAGE - 1])
def test_no_pinned_memory_to_speak_of_keeps_tensors_with_one_warning(
    cuda: sim.MockCuda, folder: str, host: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(config.settings(), host_limit=host, spill_dir=folder)
    places, store = _put_all(cuda, settings, 3, 8 * PAGE)
    assert places == ["device"] * 3
    assert store.engine.stats().num_kept_full == 3
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "stays on the GPU" in message and "host_limit" in message


def test_nothing_below_pinned_memory_takes_no_bounce_buffers(cuda: sim.MockCuda) -> None:
    settings = replace(config.settings(), host_limit=MIB, spill_dir=None)
    places, store = _put_all(cuda, settings, 5, MIB // 4)
    assert places == ["pinned"] * 4 + ["device"]
    assert store.engine.stats().bounce_bytes == 0
