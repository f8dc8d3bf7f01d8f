"""What the header of the host engine promises: tickets of CPU tensors, over pool and disk."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from actckpt.engine import native

MIB = 1 << 20
Make = Callable[..., np.ndarray]
Wait = Callable[[Callable[[], bool]], None]


class Rig:
    """An engine over a store whose disk misbehaves on demand."""

    def __init__(self, folder: str, *, num_workers: int = 2, window_bytes: int = 64 * MIB) -> None:
        self.io = native.FaultyFileIo()
        self.file = native.SpillFile(folder, faults=self.io)
        self.store = native.ByteStore.on_disk(self.file)
        self.engine = native.HostEngine(num_workers=num_workers, window_bytes=window_bytes)

    def faults(self, **values: int | bool) -> None:
        faults = native.Faults()
        for name, value in values.items():
            setattr(faults, name, value)
        self.io.set(faults)

    def put(self, data: np.ndarray) -> native.Ticket:
        return self.engine.put(data.ctypes.data, data.nbytes, self.store, data)


@pytest.fixture
def rig(folder: str) -> Rig:
    return Rig(folder)


def load(ticket: native.Ticket) -> np.ndarray:
    found = ticket.get()
    if found is None:
        out = np.zeros(ticket.nbytes, np.uint8)
        found = ticket.load(out.ctypes.data, out)
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("tier", ["pool", "disk"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_bytes_come_back_from_every_tier(folder: str, make_bytes: Make, tier: str, num_workers: int) -> None:
    pool = native.Pool()
    store = native.ByteStore.in_pool(pool) if tier == "pool" else native.ByteStore.on_disk(native.SpillFile(folder))
    engine = native.HostEngine(num_workers=num_workers, window_bytes=MIB)
    arrays = [make_bytes(n) for n in (0, 1, 4097, 100_000, 3 * MIB)]
    copies = [a.copy() for a in arrays]
    tickets = [engine.put(a.ctypes.data, a.nbytes, store, a) for a in arrays]
    engine.flush()
    engine.poll()
    for array in arrays:
        array[:] = 0  # the engine let go of them: what comes back is what was stored
    for ticket, copy in zip(tickets, copies, strict=True):
        assert np.array_equal(load(ticket), copy)
        ticket.drop()
    assert engine.stats().stored_bytes == 0 and engine.stats().num_live == 0
    assert pool.stats().stored_bytes == 0


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


def test_put_into_a_full_window_helps_instead_of_idling(folder: str, make_bytes: Make) -> None:
    rig = Rig(folder, num_workers=0, window_bytes=MIB)
    tickets = [rig.put(make_bytes(MIB)) for _ in range(3)]
    assert rig.engine.stats().written_bytes == 2 * MIB
    del tickets


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


def test_drop_during_a_load_frees_after_the_load(rig: Rig, make_bytes: Make, wait_until: Wait) -> None:
    ticket = rig.put(make_bytes(MIB))
    rig.engine.flush()
    rig.faults(hold_reads=True)
    out = np.zeros(MIB, np.uint8)
    alive = weakref.ref(out)
    ticket.prefetch(out.ctypes.data, out)
    del out
    wait_until(lambda: rig.io.num_held == 1)
    ticket.drop()
    rig.engine.poll()
    assert alive() is not None and rig.file.stats().disk_bytes == MIB
    rig.faults()
    wait_until(lambda: rig.file.stats().disk_bytes == 0)
    rig.engine.poll()
    assert alive() is None


def test_unload_during_a_load_frees_after_it_and_the_ticket_loads_again(
    rig: Rig, make_bytes: Make, wait_until: Wait
) -> None:
    data = make_bytes(MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    rig.faults(hold_reads=True)
    out = np.zeros(MIB, np.uint8)
    alive = weakref.ref(out)
    ticket.prefetch(out.ctypes.data, out)
    del out
    wait_until(lambda: rig.io.num_held == 1)
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
    with pytest.raises(native.ClosedError, match="dropped"):
        ticket.get()


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
    file = native.SpillFile(folder, limit_bytes=MIB)
    store = native.ByteStore.on_disk(file)
    engine = native.HostEngine(window_bytes=MIB)
    arrays = [make_bytes(MIB // 2) for _ in range(5)]
    tickets = [engine.put(a.ctypes.data, a.nbytes, store, a) for a in arrays]
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
    with pytest.raises(native.SpillReadError, match="checksum"):
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


def test_references_come_back_when_put_fails(rig: Rig, make_bytes: Make) -> None:
    rig.engine.shutdown()
    data = make_bytes(10)
    count = sys.getrefcount(data)
    with pytest.raises(native.ClosedError, match="shut down"):
        rig.put(data)
    assert sys.getrefcount(data) == count


def test_shutdown_is_idempotent_and_drops_still_work(rig: Rig, make_bytes: Make) -> None:
    data = make_bytes(MIB)
    alive = weakref.ref(data)
    ticket = rig.put(data)
    del data
    rig.engine.shutdown()
    rig.engine.shutdown()
    with pytest.raises(native.ClosedError):
        ticket.get()
    ticket.drop()
    assert alive() is None and rig.file.stats().disk_bytes == 0


def test_random_programs_from_several_threads_give_the_right_bytes(folder: str) -> None:
    rig = Rig(folder, window_bytes=MIB)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        data = np.random.default_rng(seed)
        live: list[tuple[native.Ticket, np.ndarray]] = []
        for _ in range(250):
            choice = rng.random()
            if choice < 0.4 or not live:
                array = data.integers(0, 256, rng.randrange(1, 100_000), dtype=np.uint8)
                live.append((rig.put(array), array.copy()))
                continue
            ticket, copy = rng.choice(live)
            if choice < 0.6:
                out = np.zeros(ticket.nbytes, np.uint8)
                ticket.prefetch(out.ctypes.data, out)
            elif choice < 0.75:
                if not np.array_equal(load(ticket), copy):
                    failures.append(f"thread {seed}")
            elif choice < 0.85:
                ticket.unload()
            else:
                live = [pair for pair in live if pair[0] is not ticket]
                ticket.drop()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.engine.flush()
    rig.engine.poll()
    gc.collect()
    assert not failures
    stats = rig.engine.stats()
    assert (stats.num_live, stats.stored_bytes, stats.graveyard_bytes, stats.inflight_bytes) == (0, 0, 0, 0)
    assert rig.file.stats().disk_bytes == 0


def test_2000_steps_leave_threads_descriptors_file_and_live_tickets_flat(rig: Rig, make_bytes: Make) -> None:
    arrays = [make_bytes(20_000 + 1000 * i) for i in range(4)]

    def step() -> None:
        tickets = [rig.put(a) for a in arrays]
        for ticket in reversed(tickets):
            load(ticket)

    def state() -> tuple[int, int, int, int]:
        stats = rig.engine.stats()
        return (
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            stats.num_live,
            stats.stored_bytes,
        )

    step()
    rig.engine.flush()
    before = state()
    for _ in range(2000):
        step()
    rig.engine.flush()
    rig.engine.poll()
    assert state() == before
    assert rig.file.stats().file_bytes <= sum(-(-a.nbytes // 4096) * 4096 for a in arrays) * 2


def test_a_forked_child_gets_errors_and_exits_cleanly(rig: Rig, make_bytes: Make, folder: str) -> None:
    ticket = rig.put(make_bytes(MIB))
    rig.engine.flush()
    child = os.fork()
    if child == 0:
        code = 0
        calls = [ticket.get, rig.engine.stats, rig.engine.flush, rig.engine.poll, lambda: rig.put(np.ones(9))]
        for call in calls:
            try:
                call()
                code = 1
            except native.ForkedError:
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


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit", "os.fork() or sys.exit(0)"])
def test_a_process_ends_cleanly_with_copies_in_flight(folder: str, ending: str) -> None:
    script = (
        "import os, sys, numpy as np\n"
        "from actckpt.engine import native\n"
        "engine = native.HostEngine()\n"
        "store = native.ByteStore.on_disk(native.SpillFile(sys.argv[1]))\n"
        "data = np.ones(1 << 22, np.uint8)\n"
        "tickets = [engine.put(data.ctypes.data, data.nbytes, store, data) for _ in range(12)]\n"
        f"{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, folder], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_freed_tensors_leave_the_resident_set_after_fix_mmap_threshold(folder: str) -> None:
    script = (
        "import sys, numpy as np\n"
        "from actckpt.engine import native\n"
        "assert native.fix_mmap_threshold(1 << 20)\n"
        "engine = native.HostEngine(window_bytes=16 << 20)\n"
        "store = native.ByteStore.on_disk(native.SpillFile(sys.argv[1]))\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = rss()\n"
        "tickets = []\n"
        "for i in range(32):\n"
        "    data = np.full(8 << 20, i, np.uint8)\n"
        "    tickets.append(engine.put(data.ctypes.data, data.nbytes, store, data))\n"
        "del data\n"
        "engine.flush(); engine.poll()\n"
        "print((rss() - before) / (32 * (8 << 20)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.25


def test_fix_mmap_threshold_refuses_what_the_c_library_cannot_take() -> None:
    assert not native.fix_mmap_threshold(1 << 40)
