"""Where pinned memory lies: on the node nearest to the device, if anybody tells, and touched before it is pinned."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sim

from actckpt import _C

PAGE = 4096
_MAPS = Path("/proc/self/numa_maps")
_BUSES = Path("/sys/bus/pci/devices")


def _put(cuda: sim.MockCuda, nbytes: int) -> tuple[_C.DeviceEngine, object]:
    engine = cuda.engine(limit_bytes=1 << 30, window_bytes=1 << 30, release=lambda keep, uses: None)
    return engine, engine.put(1 << 60, nbytes, 0, 0, None)


def _num_preferring(node: int) -> int:
    return sum(f"prefer:{node}" in line for line in _MAPS.read_text().splitlines())


@pytest.fixture
def bus_id() -> Iterator[str]:
    """Return a place on the bus that this test can write to, in capitals, as drivers write them."""
    if not _BUSES.is_dir():
        pytest.skip("there is no PCI bus")
    folder = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
    named = folder.with_name(folder.name.lower())
    folder.rename(named)
    yield f"../../../../tmp/{named.name.upper()}"
    shutil.rmtree(named)


def _told_by_the_bus(bus_id: str, text: str) -> None:
    (_BUSES / bus_id.lower() / "numa_node").write_text(text)


needs_nodes = pytest.mark.skipif(not _MAPS.exists(), reason="the kernel knows no nodes")


@needs_nodes
@pytest.mark.parametrize(("node", "preferring"), [(0, 1), (-1, 0), (64, 0), (1000, 0)])
def test_slabs_prefer_the_node_that_the_driver_names(node: int, preferring: int) -> None:
    cuda, before = sim.MockCuda(), _num_preferring(0)
    cuda.set_place(node, "")
    held = _put(cuda, PAGE)
    assert _num_preferring(0) - before == preferring
    assert cuda.faults == [] and cuda.num_pinned_bytes > 0
    del held


@needs_nodes
@pytest.mark.parametrize(("text", "preferring"), [("0\n", 1), ("-1\n", 0), ("none\n", 0), (None, 0)])
def test_slabs_prefer_the_node_that_the_bus_names(bus_id: str, text: str | None, preferring: int) -> None:
    cuda, before = sim.MockCuda(), _num_preferring(0)
    cuda.set_place(-1, bus_id)
    if text is not None:
        _told_by_the_bus(bus_id, text)
    held = _put(cuda, PAGE)
    assert _num_preferring(0) - before == preferring and cuda.num_pinned_bytes > 0
    del held


@needs_nodes
def test_the_driver_is_believed_before_the_bus(bus_id: str) -> None:
    cuda, before = sim.MockCuda(), _num_preferring(0)
    cuda.set_place(0, bus_id)
    _told_by_the_bus(bus_id, "7\n")
    held = _put(cuda, PAGE)
    assert _num_preferring(0) - before == 1
    del held


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
