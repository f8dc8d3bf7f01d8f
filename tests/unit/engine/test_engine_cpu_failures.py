"""Tickets of CPU tensors over disks that fail, fill or lie, and engines that were shut down."""

from __future__ import annotations

import errno
import sys
import weakref

import numpy as np
import pytest
from cpu_rig import MIB, Make, Rig, load

from actckpt import _C


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_loses_nothing_and_is_reported(rig: Rig, make_bytes: Make, code: int) -> None:
    rig.faults(fail_write_at=MIB // 2, write_errno=code)
    arrays = [make_bytes(MIB // 4) for _ in range(8)]
    copies = [a.copy() for a in arrays]
    tickets = [rig.put(a) for a in arrays]
    del arrays
    rig.engine.flush()
    stats = rig.engine.stats()
    assert stats.num_failed_writes > 0 and f"errno {code}" in stats.last_error
    assert stats.kept_bytes == stats.num_failed_writes * MIB // 4
    for ticket, copy in zip(tickets, copies, strict=True):
        assert np.array_equal(load(ticket), copy)
        ticket.drop()
    assert rig.engine.stats().kept_bytes == 0 and rig.file.stats().disk_bytes == 0


def test_a_full_limit_loses_nothing(folder: str, make_bytes: Make) -> None:
    file = _C.SpillFile(folder, limit_bytes=MIB)
    engine = _C.CpuEngine(file, window_bytes=MIB)
    arrays = [make_bytes(MIB // 2) for _ in range(5)]
    tickets = [engine.put(a.ctypes.data, a.nbytes, a) for a in arrays]
    engine.flush()
    assert engine.stats().num_failed_writes == 3
    for ticket, array in zip(tickets, arrays, strict=True):
        assert np.array_equal(load(ticket), array)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_altered_byte_raises_in_get_and_never_returns(rig: Rig, make_bytes: Make, ahead: bool) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    rig.faults(alter_read_at=777)
    out = np.zeros(MIB, np.uint8)
    alive = weakref.ref(out)
    with pytest.raises(_C.OffloadReadError, match="checksum"):
        if ahead:
            ticket.prefetch(out.ctypes.data, out)
            ticket.get()
        else:
            ticket.load(out.ctypes.data, out)
    del out
    rig.engine.poll()
    assert alive() is None
    rig.faults()
    assert np.array_equal(load(ticket), data)  # a second try may succeed


def test_a_get_that_raises_drops_what_was_written_meanwhile(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0)
    ticket = rig.put(make_bytes(MIB))
    rig.engine.flush()
    rig.engine.poll()
    rig.faults(alter_read_at=777)
    out, data = np.zeros(MIB, np.uint8), make_bytes(MIB)
    ticket.prefetch(out.ctypes.data, out)
    alive = weakref.ref(data)
    other = rig.put(data)
    del data
    rig.engine.flush()
    with pytest.raises(_C.OffloadReadError, match="checksum"):
        ticket.get()
    rig.engine.poll()
    assert alive() is None and other.get() is None


def test_references_come_back_when_put_fails(rig: Rig, make_bytes: Make) -> None:
    rig.engine.shutdown()
    data = make_bytes(10)
    count = sys.getrefcount(data)
    with pytest.raises(_C.OffloadError, match="shut down"):
        rig.put(data)
    assert sys.getrefcount(data) == count


def test_shutdown_is_idempotent_and_drops_still_work(rig: Rig, make_bytes: Make) -> None:
    data = make_bytes(MIB)
    alive = weakref.ref(data)
    ticket = rig.put(data)
    del data
    rig.engine.shutdown()
    rig.engine.shutdown()
    with pytest.raises(_C.OffloadError):
        ticket.get()
    ticket.drop()
    assert alive() is None and rig.file.stats().disk_bytes == 0
