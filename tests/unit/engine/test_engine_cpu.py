"""Tickets of CPU tensors: writes, reads, prefetches, the window."""

from __future__ import annotations

import sys
import threading
import weakref

import numpy as np
import pytest
from cpu_rig import MIB, Make, Rig, Wait, load

from actckpt import _C


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_bytes_come_back(folder: str, make_bytes: Make, num_workers: int) -> None:
    file = _C.SpillFile(folder)
    engine = _C.CpuEngine(file, num_workers=num_workers, window_bytes=MIB)
    arrays = [make_bytes(n) for n in (0, 1, 4097, 100_000, 3 * MIB)]
    copies = [a.copy() for a in arrays]
    tickets = [engine.put(a.ctypes.data, a.nbytes, a) for a in arrays]
    engine.flush()
    engine.poll()
    for array in arrays:
        array[:] = 0  # the engine let go of them: what comes back is what was stored
    for ticket, copy in zip(tickets, copies, strict=True):
        assert np.array_equal(load(ticket), copy)
        ticket.drop()
    assert engine.stats().stored_bytes == 0 and engine.stats().num_live == 0
    assert file.stats().disk_bytes == 0


def test_the_source_is_held_until_it_is_written_and_then_released(rig: Rig, make_bytes: Make, wait_until: Wait) -> None:
    rig.faults(hold_writes=True)
    data = make_bytes(MIB)
    alive = weakref.ref(data)
    ticket = rig.put(data)
    del data
    wait_until(lambda: rig.io.num_held == 1)
    rig.engine.poll()
    assert alive() is not None
    rig.faults()
    rig.engine.flush()
    rig.engine.poll()
    assert alive() is None
    assert ticket.get() is None


def test_a_source_that_is_still_held_is_handed_back_and_stays(rig: Rig, make_bytes: Make) -> None:
    rig.faults(hold_writes=True)
    data = make_bytes(MIB)
    ticket = rig.put(data)
    assert ticket.get() is data
    rig.faults()
    rig.engine.flush()
    rig.engine.poll()
    assert ticket.get() is data
    assert rig.engine.stats().loaded_bytes == 0
    ticket.unload()
    assert ticket.get() is None
    assert np.array_equal(load(ticket), data)


def test_prefetch_of_a_held_source_keeps_it_instead_of_loading(rig: Rig, make_bytes: Make) -> None:
    rig.faults(hold_writes=True)
    data = make_bytes(MIB)
    ticket = rig.put(data)
    out = np.zeros(MIB, np.uint8)
    assert not ticket.prefetch(out.ctypes.data, out)
    rig.faults()
    rig.engine.flush()
    assert ticket.get() is data


def test_prefetch_reads_ahead_and_get_returns_its_destination(rig: Rig, make_bytes: Make, wait_until: Wait) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    out = np.zeros(MIB, np.uint8)
    assert ticket.prefetch(out.ctypes.data, out)
    assert not ticket.prefetch(out.ctypes.data, out)
    wait_until(lambda: rig.engine.stats().loaded_bytes == MIB)
    assert ticket.get() is out and ticket.get() is out
    assert np.array_equal(out, data)
    assert (rig.engine.stats().num_prefetched, rig.engine.stats().num_late) == (1, 0)


def test_get_waits_for_a_load_that_is_running(rig: Rig, make_bytes: Make, wait_until: Wait) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    rig.faults(hold_reads=True)
    out = np.zeros(MIB, np.uint8)
    ticket.prefetch(out.ctypes.data, out)
    wait_until(lambda: rig.io.num_held == 1)
    results: list[object] = []
    reader = threading.Thread(target=lambda: results.append(ticket.get()))
    reader.start()
    assert results == []
    rig.faults()
    reader.join()
    assert results[0] is out and np.array_equal(out, data)
    assert (rig.engine.stats().num_prefetched, rig.engine.stats().num_late) == (0, 1)


def test_the_caller_runs_a_load_that_no_worker_has_begun(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0)
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    out = np.zeros(MIB, np.uint8)
    assert ticket.prefetch(out.ctypes.data, out)
    assert ticket.get() is out and np.array_equal(out, data)


def test_sources_in_flight_stay_within_the_window_or_one_tensor(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, window_bytes=2 * MIB)
    tickets = [rig.put(make_bytes(MIB // 2 + i)) for i in range(20)]
    assert 0 < rig.engine.stats().peak_inflight_bytes <= 2 * MIB
    tickets.append(rig.put(make_bytes(5 * MIB)))
    assert rig.engine.stats().peak_inflight_bytes == 5 * MIB
    rig.engine.flush()


def test_a_window_that_follows_the_sizes_grows_with_their_root_and_begins_anew(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, window_bytes=None)

    def window() -> int:
        return rig.engine.stats().window_bytes

    assert window() == 4 * MIB  # in any case
    first = rig.put(make_bytes(2 * MIB))
    assert window() == 8 * MIB  # four of the largest
    small = [rig.put(make_bytes(MIB)) for _ in range(30)]
    assert window() == 8 * MIB == (32 * MIB * 2 * MIB) ** 0.5
    more = [rig.put(make_bytes(2 * MIB)) for _ in range(48)]
    assert window() == 16 * MIB
    assert rig.engine.stats().peak_inflight_bytes <= 16 * MIB
    del first, more
    assert window() == 16 * MIB  # backward has not read all of it yet
    del small
    assert window() == 4 * MIB
    huge = [rig.put(make_bytes(100 * MIB)) for _ in range(2)]
    assert window() == 256 * MIB
    del huge


def test_put_into_a_full_window_helps_instead_of_idling(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0, window_bytes=MIB)
    tickets = [rig.put(make_bytes(MIB)) for _ in range(3)]
    assert rig.engine.stats().written_bytes == 2 * MIB
    del tickets


def test_a_put_that_may_not_wait_keeps_where_the_window_is_full(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0, window_bytes=MIB)
    first, second = make_bytes(MIB), make_bytes(1)
    ticket = rig.put(first)
    count = sys.getrefcount(second)
    kept = rig.engine.put(second.ctypes.data, second.nbytes, second, must=False)
    assert kept == _C.Kept.BUSY and sys.getrefcount(second) == count
    assert rig.engine.stats().num_kept_busy == 1 and rig.engine.stats().stall_seconds == 0
    rig.engine.flush()
    again = rig.engine.put(second.ctypes.data, second.nbytes, second, must=False)
    assert isinstance(again, _C.CpuTicket) and np.array_equal(load(ticket), first)


def test_inline_loads_and_waits_for_the_window_are_stalls(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0, window_bytes=8 * MIB)
    data = make_bytes(8 * MIB)
    expected = data.copy()
    first = rig.put(data)
    assert rig.engine.stats().stall_seconds == 0
    second = rig.put(make_bytes(MIB))
    waited = rig.engine.stats().stall_seconds
    assert waited > 0
    rig.engine.flush()
    assert rig.engine.stats().stall_seconds == waited
    assert np.array_equal(load(first), expected) and second.nbytes == MIB
    assert rig.engine.stats().stall_seconds > waited
