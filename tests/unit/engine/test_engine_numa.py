"""Where pinned memory lies: near the device, if the driver knows where that is, and touched before it is pinned."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import sim

from actckpt import _C

PAGE = 4096
_MAPS = Path("/proc/self/numa_maps")


def _put(cuda: sim.MockCuda, nbytes: int) -> tuple[_C.DeviceEngine, object]:
    engine = cuda.engine(limit_bytes=1 << 30, window_bytes=1 << 30, release=lambda keep, uses: None)
    return engine, engine.put(1 << 60, nbytes, 0, 0, None)


def _num_preferring(node: int) -> int:
    return sum(f"prefer:{node}" in line for line in _MAPS.read_text().splitlines())


needs_nodes = pytest.mark.skipif(not _MAPS.exists(), reason="the kernel knows no nodes")


@needs_nodes
@pytest.mark.parametrize(("node", "preferring"), [(0, 1), (-1, 0), (64, 0), (1000, 0)])
def test_slabs_prefer_the_node_that_the_driver_names(node: int, preferring: int) -> None:
    cuda, before = sim.MockCuda(), _num_preferring(0)
    cuda.set_node(node)
    held = _put(cuda, PAGE)
    assert _num_preferring(0) - before == preferring
    assert cuda.faults == [] and cuda.num_pinned_bytes > 0
    del held


def _resident_bytes() -> int:
    """Count pages of memory that is no file's. The counters of `statm` are late by up to a quarter of a MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(kib) << 10


_KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.mark.skipif(_KERNEL < (5, 14), reason="the kernel has no MADV_POPULATE_WRITE")
@pytest.mark.parametrize("mib", [8, 160])
def test_all_pages_of_a_slab_are_touched_before_it_is_pinned(mib: int) -> None:
    """By several threads where there are more than 64 MiB; nothing has been copied yet."""
    cuda, before = sim.MockCuda(), _resident_bytes()
    engine, ticket = _put(cuda, mib << 20)
    slab_bytes = engine.pool_stats().pool_bytes
    assert slab_bytes >= mib << 20 and _resident_bytes() - before > 0.98 * slab_bytes
    assert cuda.num_pinned_bytes == slab_bytes
    del ticket
