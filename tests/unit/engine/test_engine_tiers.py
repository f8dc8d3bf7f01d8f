"""Device tensors below pinned memory: disk through bounce buffers, over a mock driver.

Values and orders are judged by the simulator (test_engine_protocol.py); here stand the choices, figures and failures.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import mock_tensor
import pytest
import sim
from mock_tensor import DEFAULT, PAGE, Tensor

import actckpt
from actckpt import _C, config
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore


class Rig(mock_tensor.Rig):
    """An engine with little pinned memory and buffers of one page, half of them for each direction."""

    def __init__(self, *, pinned: int = 0, num_buffers: int = 4, **options: Any) -> None:
        options.setdefault("spill_file", _C.SpillFile(tempfile.gettempdir()))
        super().__init__(limit_bytes=pinned, bounce_bytes=2 * num_buffers * PAGE, buffer_bytes=PAGE, **options)
        RIGS.append(self)

    def refuse(self, tensor: Tensor, **options: bool) -> _C.Kept:
        count = sys.getrefcount(tensor)
        kept = self.engine.put(tensor.ptr, tensor.nbytes, 0, DEFAULT, tensor, **options)
        assert isinstance(kept, _C.Kept) and sys.getrefcount(tensor) == count
        return kept

    def load(self, ticket: _C.DeviceTicket, *, urgent: bool = True) -> Tensor:
        buffer = Tensor(ticket.nbytes // PAGE)
        assert ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=urgent)
        return buffer

    def settle(self) -> None:
        for _ in range(4):
            self.cuda.drain()
            self.engine._work()
            self.engine.poll()


RIGS: list[Rig] = []


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    assert [rig.cuda.faults for rig in RIGS if rig.cuda.faults] == []
    RIGS.clear()
    gc.collect()


def test_pinned_then_disk_then_the_device(folder: str) -> None:
    rig = Rig(pinned=2 * PAGE, spill_file=_C.SpillFile(folder, limit_bytes=3 * PAGE))
    tickets = []
    for _ in range(5):
        tickets.append(rig.put(Tensor()))
        rig.settle()
    assert [ticket.tier for ticket in tickets] == ["pinned"] * 2 + ["disk"] * 3
    assert rig.refuse(Tensor()) == _C.Kept.FULL
    figures = rig.engine.stats()
    assert (figures.disk_bytes, figures.num_kept_full) == (3 * PAGE, 1)
    assert rig.engine.pool_stats().pool_bytes + figures.bounce_bytes == (2 + 8) * PAGE
    for ticket in tickets:
        ticket.drop()
    rig.settle()
    figures = rig.engine.stats()
    assert (figures.disk_bytes, figures.num_live) == (0, 0)


def test_the_source_goes_once_the_bounce_buffer_has_it() -> None:
    rig = Rig()
    tensor = Tensor(2)
    alive = weakref.ref(tensor)
    ticket = rig.put(tensor)
    del tensor
    rig.engine.poll()
    assert alive() is not None
    rig.cuda.drain()
    rig.engine.poll()  # no worker has run
    rig.released.clear()
    assert alive() is None and ticket.get(0, DEFAULT) is None


def test_a_full_ring_keeps_without_waiting_under_prefer() -> None:
    rig = Rig(num_buffers=2)
    first = rig.put(Tensor(2), must=False)
    assert rig.refuse(Tensor(), must=False) == _C.Kept.BUSY
    rig.settle()
    second = rig.put(Tensor(), must=False)
    assert first.tier == second.tier == "disk" and rig.engine.stats().num_host_waits == 0


def test_prefer_keeps_where_copies_lag_by_a_window_and_not_where_the_host_runs_ahead() -> None:
    rig = Rig(pinned=1 << 20, window_bytes=2 * PAGE)
    tickets = [rig.put(Tensor(), must=False) for _ in range(20)]  # nothing has run: nothing is ready
    assert len(tickets) == 20 and rig.engine.stats().num_kept_behind == 0
    assert rig.engine.stats().inflight_bytes <= 3 * PAGE


def test_a_tensor_that_gets_stuck_half_way_stays_on_the_device_and_leaves_nothing(folder: str) -> None:
    io, faults = sim.FaultyFileIo(), sim.Faults()
    faults.fail_write_at, faults.write_errno = 0, 5
    io.set(faults)
    rig = Rig(num_buffers=2, spill_file=sim.spill_file(folder, io))
    tensor = Tensor(5)
    assert rig.engine.put(tensor.ptr, tensor.nbytes, 0, DEFAULT, tensor) == _C.Kept.FULL
    rig.settle()
    figures = rig.engine.stats()
    assert (figures.stuck_bytes, figures.disk_bytes, figures.num_live, figures.inflight_bytes) == (0, 0, 0, 0)
    assert figures.num_failed_writes == 2 and figures.num_full_writes == 0
    assert rig.released[-1][0] is tensor  # held while the pieces under way were read from it


def test_a_refused_pin_of_the_bounce_buffers_keeps() -> None:
    rig = Rig()
    rig.cuda.refuse_pins(True)
    assert rig.refuse(Tensor()) == _C.Kept.FULL
    rig.cuda.refuse_pins(False)
    assert rig.refuse(Tensor()) == _C.Kept.FULL  # for good: a limit of the system rarely goes away


def test_stream_waits_are_measured_once_they_have_passed() -> None:
    rig = Rig(pinned=1 << 20)
    ticket = rig.put(Tensor())
    rig.settle()
    buffer = rig.load(ticket)
    assert ticket.get(0, DEFAULT) == (buffer, False)  # the stream waits for a copy that has not run
    assert rig.engine.stats().stall_seconds == 0
    ticket.drop()
    del ticket
    rig.settle()
    assert rig.engine.stats().num_late == 1
    assert rig.engine.stats().stall_seconds >= 1e-3  # the mock's unit


def test_the_graveyard_counts_toward_the_window() -> None:
    rig = Rig(pinned=1 << 20, window_bytes=2 * PAGE)
    tickets = [rig.put(Tensor()) for _ in range(3)]
    rig.settle()
    for ticket in tickets:
        rig.load(ticket, urgent=False)
        ticket.unload()
    assert rig.engine.stats().inflight_bytes == rig.engine.stats().graveyard_bytes == 3 * PAGE
    rig.put(Tensor())  # the stream waits for the oldest copies, the host does not
    assert rig.engine.stats().inflight_bytes <= 3 * PAGE
    assert rig.engine.stats().num_early_releases >= 2
    rig.settle()
    assert rig.engine.stats().graveyard_bytes == 0


def test_stats_add_up_pinned_memory_and_disk(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_stores", {})
    actckpt.reset_stats()
    rig = Rig(pinned=PAGE, spill_file=_C.SpillFile(folder))
    monkeypatch.setitem(stores._stores, "cuda", (config.generation, DeviceStore(rig.engine, sim.OneStream("cuda"))))
    tickets = [rig.put(Tensor()) for _ in range(3)]
    rig.settle()
    found = actckpt.stats()
    assert (found.host_bytes, found.disk_bytes) == (9 * PAGE, 2 * PAGE)
    assert (found.store_bytes, found.peak_store_bytes, found.inflight_bytes) == (3 * PAGE, 3 * PAGE, 0)
    buffer = rig.load(tickets[1])
    assert tickets[1].get(0, DEFAULT) == (buffer, False)
    rig.settle()
    assert actckpt.stats().stall_seconds > 0
    tickets.clear()
    rig.settle()
    assert actckpt.stats().store_bytes == 0
