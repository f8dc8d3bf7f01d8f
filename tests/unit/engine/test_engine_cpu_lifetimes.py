"""Tickets of CPU tensors: what a drop frees, and when."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from cpu_rig import MIB, Make, Rig, Wait, load

from actckpt import _C


def test_drop_during_a_write_frees_after_the_write(rig: Rig, make_bytes: Make, wait_until: Wait) -> None:
    rig.faults(hold_writes=True)
    data = make_bytes(MIB)
    alive = weakref.ref(data)
    ticket = rig.put(data)
    del data
    wait_until(lambda: rig.io.num_held == 1)
    ticket.drop()
    rig.engine.poll()
    assert alive() is not None
    assert rig.engine.stats().graveyard_bytes == MIB
    rig.faults()
    rig.engine.flush()
    rig.engine.poll()
    assert alive() is None
    assert rig.engine.stats().graveyard_bytes == 0
    wait_until(lambda: rig.file.stats().disk_bytes == 0)


def test_a_source_goes_once_it_is_written_though_nobody_calls_again(
    rig: Rig, make_bytes: Make, wait_until: Wait
) -> None:
    sources = [make_bytes(MIB) for _ in range(3)]
    alive = [weakref.ref(data) for data in sources]
    tickets = [rig.put(data) for data in sources]
    del sources
    wait_until(lambda: all(reference() is None for reference in alive))
    assert all(ticket.get() is None for ticket in tickets)


def _held_load(rig: Rig, data: np.ndarray, wait_until: Wait) -> tuple[_C.CpuTicket, weakref.ref[np.ndarray]]:
    """Begin a load that stays under way; return whether the array that it fills is alive, too."""
    ticket = rig.put(data)
    rig.engine.flush()
    rig.engine.poll()
    rig.faults(hold_reads=True)
    out = np.zeros(MIB, np.uint8)
    ticket.prefetch(out.ctypes.data, out)
    wait_until(lambda: rig.io.num_held == 1)
    return ticket, weakref.ref(out)


@pytest.mark.parametrize("somebody_calls_again", [True, False])
def test_drop_during_a_load_frees_after_the_load(
    rig: Rig, make_bytes: Make, wait_until: Wait, somebody_calls_again: bool
) -> None:
    ticket, alive = _held_load(rig, make_bytes(MIB), wait_until)
    ticket.drop()
    if somebody_calls_again:
        rig.engine.poll()
    assert alive() is not None and rig.file.stats().disk_bytes == MIB
    rig.faults()
    wait_until(lambda: rig.file.stats().disk_bytes == 0)
    if somebody_calls_again:
        rig.engine.poll()
        assert alive() is None
    wait_until(lambda: alive() is None)


def test_unload_during_a_load_frees_after_it_and_the_ticket_loads_again(
    rig: Rig, make_bytes: Make, wait_until: Wait
) -> None:
    data = make_bytes(MIB)
    ticket, alive = _held_load(rig, data, wait_until)
    ticket.unload()
    assert ticket.get() is None and alive() is not None
    rig.faults()
    wait_until(lambda: rig.engine.stats().graveyard_bytes == 0)
    rig.engine.poll()
    assert alive() is None
    assert np.array_equal(load(ticket), data)


def test_drop_before_a_write_began_cancels_it(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0)
    data = make_bytes(MIB)
    alive = weakref.ref(data)
    ticket = rig.put(data)
    del data
    ticket.drop()
    assert alive() is None
    rig.engine.flush()
    assert rig.engine.stats().written_bytes == 0 and rig.engine.stats().inflight_bytes == 0


def test_a_ticket_that_dies_is_dropped_also_in_a_reference_cycle(rig: Rig, make_bytes: Make) -> None:
    cycle: list[object] = [rig.put(make_bytes(MIB))]
    cycle.append(cycle)
    rig.engine.flush()
    assert rig.file.stats().disk_bytes == MIB
    del cycle
    gc.collect()
    assert rig.file.stats().disk_bytes == 0


def test_a_dropped_ticket_says_so(rig: Rig, make_bytes: Make) -> None:
    ticket = rig.put(make_bytes(10))
    ticket.drop()
    ticket.drop()
    with pytest.raises(_C.OffloadError, match="dropped"):
        ticket.get()


def test_what_ends_before_a_thread_began_it_leaves_nothing_in_the_queues(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0)
    data, stays = make_bytes(10), make_bytes(10)
    kept = rig.put(stays)
    for _ in range(5):
        rig.put(data).drop()
    assert rig.engine.stats().num_queued == 1, "the one that lives"
    rig.engine.flush()
    out = np.zeros(10, np.uint8)
    for end in (kept.unload, kept.get, kept.drop):
        kept.unload()
        assert kept.prefetch(out.ctypes.data, out)
        assert rig.engine.stats().num_queued == 1
        end()
        assert rig.engine.stats().num_queued == 0, end
    assert np.array_equal(out, stays)
