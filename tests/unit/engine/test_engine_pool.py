"""What the header of the pool promises."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest

from actckpt import _C

MIB = 1 << 20


def fill(block: _C.PoolBlock, value: int) -> None:
    for ptr, nbytes in block.segments:
        ctypes.memset(ptr, value, nbytes)


def holds(block: _C.PoolBlock, value: int) -> bool:
    return all(ctypes.string_at(p, n) == bytes([value]) * n for p, n in block.segments)


def test_segments_of_a_block_add_up_to_its_bytes() -> None:
    pool = _C.Pool()
    for nbytes in (0, 1, 4095, 4096, 4097, 3 * MIB + 5):
        block = pool.allocate(nbytes)
        assert sum(n for _, n in block.segments) == nbytes == block.nbytes


def test_blocks_never_overlap_and_never_cross_a_slab() -> None:
    rng = random.Random(1)
    pool = _C.Pool(slab_bytes=256 * 1024)
    blocks: dict[int, _C.PoolBlock] = {}
    for step in range(400):
        if blocks and rng.random() < 0.5:
            key = rng.choice(list(blocks))
            assert holds(blocks[key], key % 251)
            blocks.pop(key).free()
        else:
            blocks[step] = pool.allocate(rng.randrange(1, 200_000))
            fill(blocks[step], step % 251)
    for key, block in blocks.items():
        assert holds(block, key % 251)


def test_a_block_spans_slabs_when_no_single_extent_is_large_enough() -> None:
    pool = _C.Pool(limit_bytes=4 * MIB, slab_bytes=MIB, growth_percent=0)
    small = [pool.allocate(MIB // 2) for _ in range(8)]
    for block in small[::2]:
        block.free()
    block = pool.allocate(2 * MIB)
    assert len(block.segments) == 4
    assert pool.stats().pool_bytes == 4 * MIB


def test_pool_stays_within_5_percent_and_one_slab_of_the_peak_with_1000_sizes() -> None:
    rng = random.Random(2)
    sizes = rng.sample(range(64 * 1024, 2 * MIB), 1000)
    pool = _C.Pool(slab_bytes=8 * MIB)
    for _ in range(5):
        live: list[_C.PoolBlock] = []
        for nbytes in rng.sample(sizes, len(sizes)):
            live.append(pool.allocate(nbytes))
            if len(live) > 120:
                live.pop(rng.randrange(len(live))).free()
        for block in live:
            block.free()
    stats = pool.stats()
    step = max(8 * MIB, stats.peak_pool_bytes * 3 // 100)
    assert stats.stored_bytes == 0 and stats.num_blocks == 0
    assert stats.peak_pool_bytes <= 1.05 * stats.peak_stored_bytes + step
    assert stats.free_bytes == stats.pool_bytes


def test_free_extents_merge_again() -> None:
    pool = _C.Pool(limit_bytes=MIB)
    blocks = [pool.allocate(4096) for _ in range(256)]
    random.Random(3).shuffle(blocks)
    for block in blocks:
        block.free()
    assert pool.stats().largest_free_bytes == MIB


def test_limit_holds_and_the_error_names_both_numbers() -> None:
    pool = _C.Pool(limit_bytes=10 * MIB)
    block = pool.allocate(6 * MIB)
    assert pool.stats().pool_bytes == 10 * MIB
    with pytest.raises(_C.OffloadFullError, match=r"hold 5\.0 MiB.*\n.*limit 10\.0 MiB.*6\.0 MiB"):
        pool.allocate(5 * MIB)
    block.free()
    assert pool.allocate(10 * MIB).nbytes == 10 * MIB


def test_a_refusal_by_the_system_leaves_the_pool_usable() -> None:
    pool = _C.Pool()
    with pytest.raises(_C.OffloadFullError, match="cannot"):
        pool.allocate(1 << 60)
    assert pool.allocate(MIB).nbytes == MIB


def test_growth_is_one_slab_or_3_percent() -> None:
    pool = _C.Pool(slab_bytes=MIB, growth_percent=50)
    keep = [pool.allocate(MIB // 2)]
    assert pool.stats().pool_bytes == MIB
    keep.append(pool.allocate(63 * MIB))
    before = pool.stats().pool_bytes
    keep.append(pool.allocate(before - pool.stats().stored_bytes + 4096))
    assert before // 2 - MIB <= pool.stats().pool_bytes - before <= before // 2 + 2 * MIB


def test_trim_unmaps_empty_slabs_only() -> None:
    pool = _C.Pool(slab_bytes=2 * MIB)
    first, second = pool.allocate(2 * MIB), pool.allocate(2 * MIB)
    fill(second, 7)
    assert pool.trim() == 0
    first.free()
    assert pool.trim() == 2 * MIB
    assert pool.stats().pool_bytes == 2 * MIB and pool.stats().num_slabs == 1
    assert holds(second, 7)


def test_freed_blocks_may_be_freed_twice_and_dropped_blocks_return() -> None:
    pool = _C.Pool()
    block = pool.allocate(MIB)
    block.free()
    block.free()
    pool.allocate(MIB)
    assert pool.stats().num_blocks == 0


def smaps_flags(ptr: int) -> set[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= ptr < high
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("the address is not mapped")


def test_slabs_are_not_inherited_nor_dumped_and_ask_for_huge_pages() -> None:
    block = _C.Pool().allocate(4 * MIB)
    flags = smaps_flags(block.segments[0][0])
    assert {"dc", "dd"} <= flags
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags
    assert block.segments[0][0] % (2 * MIB) == 0
