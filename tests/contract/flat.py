"""Nothing may grow with the number of steps: a measure, and how many steps it takes.

A test that is given `STEPS` runs 2,000 of them; `make soak` runs 20,000 (marker `soak`, which pytest leaves out unless
it is asked for):

    @pytest.mark.parametrize("steps", STEPS)
    def test_my_loop_stays_flat(steps: int) -> None:
        assert_flat(step, steps)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
from internals.stores import flush

import actckpt
from actckpt.memory import LiveStorages

STEPS = [2_000, pytest.param(20_000, marks=pytest.mark.soak)]

_SLACK = {"live bytes": 0, "bytes in stores": 0, "objects": 10, "resident bytes": 4 << 20}


def assert_flat(step: Callable[[], object], steps: int) -> None:
    """Run `step` so many times; no more must be there at the end than after a fifth of them.

    Bytes in stores exactly, Python objects within 10, resident memory within 4 MiB; and bytes of tensors exactly, in
    the second half of that fifth, since the mode that counts them makes a step two to three times as long.
    """
    with LiveStorages() as live:
        _repeat(step, steps // 10)
        _look()
        live_bytes = live.live_bytes
        _repeat(step, steps // 10)
        _look()
        live_bytes = live.live_bytes - live_bytes
    early = _look()
    _repeat(step, steps - steps // 10 * 2)
    late = _look()
    grown = {name: late[name] - early[name] for name in late} | {"live bytes": live_bytes}
    assert all(change <= _SLACK[name] for name, change in grown.items()), f"in {steps} steps: {grown}"


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _look() -> dict[str, int]:
    flush()  # lets go of what was copied
    gc.collect()
    with open("/proc/self/statm") as file:
        resident_pages = int(file.read().split()[1])
    return {
        "bytes in stores": actckpt.stats().store_bytes,
        "objects": len(gc.get_objects()),
        "resident bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
    }
