"""Tickets of CPU tensors among threads, forks and process ends; nothing is left."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from cpu_rig import MIB, Make, Rig, load
from oracle import in_threads

from actckpt import _C


def test_random_programs_from_several_threads_give_the_right_bytes(folder: str) -> None:
    rig = Rig(folder, window_bytes=MIB)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        data = np.random.default_rng(seed)
        live: list[tuple[_C.CpuTicket, np.ndarray]] = []
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
    assert (stats.num_live, stats.stored_bytes, stats.graveyard_bytes, stats.inflight_bytes) == (0, 0, 0, 0)
    assert rig.file.stats().disk_bytes == 0


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


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit", "os.fork() or sys.exit(0)"])
def test_a_process_ends_cleanly_with_copies_in_flight(folder: str, ending: str) -> None:
    script = (
        "import os, sys, numpy as np\n"
        "from actckpt import _C\n"
        "engine = _C.CpuEngine(_C.SpillFile(sys.argv[1]))\n"
        "data = np.ones(1 << 22, np.uint8)\n"
        "tickets = [engine.put(data.ctypes.data, data.nbytes, data) for _ in range(12)]\n"
        f"{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, folder], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_freed_tensors_leave_the_resident_set_after_fix_mmap_threshold(folder: str) -> None:
    script = (
        "import sys, numpy as np\n"
        "from actckpt import _C\n"
        "assert _C.fix_mmap_threshold(1 << 20)\n"
        "engine = _C.CpuEngine(_C.SpillFile(sys.argv[1]), window_bytes=16 << 20)\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = rss()\n"
        "tickets = []\n"
        "for i in range(32):\n"
        "    data = np.full(8 << 20, i, np.uint8)\n"
        "    tickets.append(engine.put(data.ctypes.data, data.nbytes, data))\n"
        "del data\n"
        "engine.flush(); engine.poll()\n"
        "print((rss() - before) / (32 * (8 << 20)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.25


def test_fix_mmap_threshold_refuses_what_the_c_library_cannot_take() -> None:
    assert not _C.fix_mmap_threshold(1 << 40)
