"""Tickets of CPU tensors: copied to bounce buffers when they are put, and by workers to the file and back."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from cpu_rig import MIB, PAGE, Make, Rig, Wait, begin_load, load
from oracle import in_threads

from actckpt import _C


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_bytes_come_back_whatever_their_size(folder: str, make_bytes: Make, num_workers: int) -> None:
    rig = Rig(folder, num_workers=num_workers)
    arrays = [make_bytes(nbytes) for nbytes in (1, 4097, 100_000, 3 * MIB, 9 * MIB + 13)]
    copies = [array.copy() for array in arrays]
    tickets = [rig.put(array) for array in arrays]
    for array in arrays:
        array[:] = 0
    for is_flushed in (False, True):
        if is_flushed:
            rig.engine.flush()
        for ticket, copy in zip(tickets, copies, strict=True):
            assert np.array_equal(load(ticket), copy)
            ticket.unload()
    tickets.clear()
    del ticket
    rig.engine.flush()
    rig.engine.poll()
    stats = rig.engine.stats()
    assert (stats.num_live, stats.disk_bytes, stats.inflight_bytes, stats.graveyard_bytes) == (0, 0, 0, 0)
    assert rig.file.stats().disk_bytes == 0


def test_a_source_is_released_when_put_returns(rig: Rig, make_bytes: Make) -> None:
    rig.faults(hold_writes=True)
    data = make_bytes(2 * MIB)
    expected, alive = data.copy(), weakref.ref(data)
    ticket = rig.put(data)
    del data
    assert alive() is None
    assert np.array_equal(load(ticket), expected), "its bounce buffers have the bytes"
    rig.faults()


def test_get_waits_for_a_load_that_is_running_and_not_for_one_that_has_ended(
    rig: Rig, make_bytes: Make, wait_until: Wait
) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    rig.faults(hold_reads=True)
    out = begin_load(ticket)
    wait_until(lambda: rig.io.num_held == 1)
    results: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: results.append(load(ticket)))
    reader.start()
    reader.join(0.01)
    assert results == []
    rig.faults()
    reader.join()
    assert results[0] is out and np.array_equal(out, data)
    assert (rig.engine.stats().num_prefetched, rig.engine.stats().num_late) == (0, 1)
    assert rig.engine.stats().stall_seconds > 0
    ticket.unload()
    ahead = begin_load(ticket)
    assert not ticket.load(0, 0, ahead.ctypes.data, ahead, urgent=False)
    wait_until(lambda: np.array_equal(ahead, data))
    rig.engine.poll()
    assert load(ticket) is ahead and rig.engine.stats().num_prefetched == 1


def test_a_put_without_a_free_buffer_writes_itself_or_keeps(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0, num_buffers=2, buffer_bytes=PAGE)
    sources = [make_bytes(PAGE) for _ in range(3)]
    first, second = (rig.try_put(data, must=False) for data in sources[:2])
    last = sources[2]
    count = sys.getrefcount(last)
    kept = rig.try_put(last, must=False)
    assert kept == _C.Kept.BUSY and sys.getrefcount(last) == count
    assert rig.engine.stats().num_host_waits == 0 and rig.file.stats().written_bytes == 0
    third = rig.put(sources[2])
    stats = rig.engine.stats()
    assert (stats.num_host_waits, stats.num_kept_busy) == (1, 1) and stats.stall_seconds > 0
    assert rig.file.stats().written_bytes > 0
    for ticket, data in zip((first, second, third), sources, strict=True):
        assert isinstance(ticket, _C.DeviceTicket) and np.array_equal(load(ticket), data)


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
    del first, more
    rig.engine.poll()
    assert window() == 16 * MIB  # backward has not read all of it yet
    del small
    rig.engine.poll()
    assert window() == 4 * MIB
    huge = [rig.put(make_bytes(100 * MIB)) for _ in range(2)]
    assert window() == 256 * MIB
    del huge


@pytest.mark.parametrize("end", ["drop", "unload"])
def test_what_ends_during_a_load_frees_its_destination_at_once(
    rig: Rig, make_bytes: Make, wait_until: Wait, end: str
) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    rig.faults(hold_reads=True)
    alive = weakref.ref(begin_load(ticket))
    wait_until(lambda: rig.io.num_held == 1)
    getattr(ticket, end)()
    assert alive() is None and rig.file.stats().disk_bytes == MIB
    rig.faults()
    if end == "unload":
        assert np.array_equal(load(ticket), data)
    else:
        wait_until(lambda: rig.file.stats().disk_bytes == 0)


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
        ticket.get(0, 0)


def test_after_shutdown_tensors_stay_get_raises_and_drops_work(rig: Rig, make_bytes: Make) -> None:
    ticket = rig.put(make_bytes(MIB))
    rig.engine.flush()
    rig.engine.shutdown()
    rig.engine.shutdown()
    data = make_bytes(10)
    count = sys.getrefcount(data)
    assert rig.try_put(data) == _C.Kept.FAILED and sys.getrefcount(data) == count
    with pytest.raises(_C.OffloadError, match="the process is ending"):
        ticket.get(0, 0)
    ticket.drop()


def test_random_programs_from_several_threads_give_the_right_bytes(folder: str) -> None:
    rig = Rig(folder, num_buffers=3, buffer_bytes=4 * PAGE)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        data = np.random.default_rng(seed)
        live: list[tuple[_C.DeviceTicket, np.ndarray]] = []
        for _ in range(250):
            choice = rng.random()
            if choice < 0.4 or not live:
                array = data.integers(0, 256, rng.randrange(1, 100_000), dtype=np.uint8)
                live.append((rig.put(array), array.copy()))
                continue
            ticket, copy = rng.choice(live)
            if choice < 0.6:
                out = np.zeros(ticket.nbytes, np.uint8)
                ticket.load(0, 0, out.ctypes.data, out, urgent=False)
            elif choice < 0.75:
                assert np.array_equal(load(ticket), copy)
            elif choice < 0.85:
                ticket.unload()
            else:
                live = [pair for pair in live if pair[0] is not ticket]
                ticket.drop()

    in_threads(work, 4)
    rig.engine.flush()
    rig.engine.poll()
    gc.collect()
    stats = rig.engine.stats()
    assert (stats.num_live, stats.disk_bytes, stats.graveyard_bytes, stats.inflight_bytes) == (0, 0, 0, 0)
    assert rig.file.stats().disk_bytes == 0


def test_a_forked_child_gets_errors_and_exits_cleanly(rig: Rig, make_bytes: Make, folder: str) -> None:
    ticket = rig.put(make_bytes(MIB))
    rig.engine.flush()
    child = os.fork()
    if child == 0:
        code = 0
        get = [lambda: ticket.get(0, 0), lambda: rig.put(np.ones(9))]
        for call in [*get, rig.engine.stats, rig.engine.flush, rig.engine.poll]:
            try:
                call()
                code = 1
            except _C.ForkedError:
                pass
        ticket.drop()
        rig.engine.shutdown()
        own = Rig(folder)  # the child may make an engine of its own
        data = np.arange(1000, dtype=np.uint8)
        if not np.array_equal(load(own.put(data)), data):
            code = 2
        own.engine.shutdown()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert load(ticket).nbytes == MIB


_IMPORT = "import os, sys, numpy as np\nfrom actckpt import _C\n"
_MAKE = (
    "engine = _C.DeviceEngine.host(spill_file=_C.SpillFile(sys.argv[1]), window_bytes=None, bounce_bytes=16 << 20)\n"
)


def test_a_process_ends_cleanly_with_copies_in_flight(folder: str) -> None:
    """Each ending is that of a child, made once torch is imported."""
    script = (
        f"{_IMPORT}for ending in sys.argv[2:]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        break\n"
        "    assert os.waitpid(child, 0)[1] == 0, ending\n"
        "else:\n"
        "    sys.exit(0)\n"
        f"{_MAKE}data = np.ones(1 << 22, np.uint8)\n"
        "tickets = [engine.put(data.ctypes.data, data.nbytes, 0, 0, data) for _ in range(12)]\n"
        "exec(ending)\n"
    )
    endings = ["pass", "sys.exit(0)", "raise SystemExit", "os.fork() or sys.exit(0)"]
    command = [sys.executable, "-W", "ignore", "-c", script, folder, *endings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_freed_tensors_leave_the_resident_set_after_fix_mmap_threshold(folder: str) -> None:
    script = (
        f"{_IMPORT}{_MAKE}assert _C.fix_mmap_threshold(1 << 20)\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = rss()\n"
        "tickets = []\n"
        "for i in range(32):\n"
        "    data = np.full(8 << 20, i, np.uint8)\n"
        "    tickets.append(engine.put(data.ctypes.data, data.nbytes, 0, 0, data))\n"
        "del data\n"
        "print((rss() - before) / (32 * (8 << 20)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.15


def test_fix_mmap_threshold_refuses_what_the_c_library_cannot_take() -> None:
    assert not _C.fix_mmap_threshold(1 << 40)
