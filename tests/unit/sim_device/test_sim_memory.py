"""The allocator: blocks belong to streams, a capacity, figures, and poison."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from sim import device

KIB = 1024


@pytest.fixture(autouse=True)
def _empty() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


def _late_use(tensor: torch.Tensor, side: torch.Stream) -> None:
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        torch.zeros(tensor.shape, pin_memory=True).copy_(tensor, non_blocking=True)


def test_a_freed_block_is_handed_out_again_at_once_on_its_stream() -> None:
    first = torch.ones(100, device="sim")
    address = first.data_ptr()
    del first
    assert torch.empty(100, device="sim").data_ptr() == address
    with torch.Stream(device="sim"):
        assert torch.empty(100, device="sim").data_ptr() != address


def test_recorded_uses_keep_a_freed_block_until_they_have_passed() -> None:
    side = torch.Stream(device="sim")
    first = torch.ones(100, device="sim")
    address = first.data_ptr()
    _late_use(first, side)
    first.record_stream(side)
    del first
    assert torch.empty(100, device="sim").data_ptr() != address
    side.synchronize()
    assert torch.empty(100, device="sim").data_ptr() == address


def test_what_is_fresh_or_freed_is_poisoned() -> None:
    assert torch.empty(100, device="sim").isnan().all()
    first = torch.ones(100, device="sim")
    del first
    assert torch.empty(100, device="sim").isnan().all()


def test_figures_are_those_of_torch_cuda() -> None:
    before = torch.sim.memory_allocated(1)
    torch.sim.reset_peak_memory_stats(1)
    first = torch.empty(100 * KIB, dtype=torch.uint8, device="sim:1")
    second = torch.empty(1, device="sim:1")
    assert torch.sim.memory_allocated(1) - before == 100 * KIB + 512
    del first
    assert torch.sim.memory_allocated("sim:1") - before == 512
    assert torch.sim.max_memory_allocated(torch.device("sim:1")) - before == 100 * KIB + 512
    torch.sim.reset_peak_memory_stats(1)
    assert torch.sim.max_memory_allocated(1) == torch.accelerator.max_memory_allocated(1) == before + 512
    assert torch.sim.memory_reserved(1) >= before + 100 * KIB + 512
    free, total = torch.sim.mem_get_info(1)
    assert total - free == torch.sim.memory_reserved(1) and (free, total) == torch.accelerator.get_memory_info(1)
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved(1) == before + 512
    assert torch.sim.memory_stats(1)["requested_bytes.all.current"] >= 4
    assert second.device.index == 1


def test_snapshots_list_what_lives() -> None:
    with torch.device("sim:1"):
        kept = torch.empty(1000)
    blocks = {block["address"]: block for block in torch.sim.memory_snapshot()}
    assert blocks[kept.data_ptr()] == {
        "device": 1,
        "address": kept.data_ptr(),
        "size": 4096,
        "requested_size": 4000,
        "stream": 0,
    }


def test_beyond_the_capacity_it_raises_and_recovers() -> None:
    with device.capacity(1, 1024 * KIB):
        kept = torch.empty(400 * KIB, dtype=torch.uint8, device="sim:1")
        with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 819200 bytes; the capacity is 1048576"):
            torch.empty(800 * KIB, dtype=torch.uint8, device="sim:1")
        with pytest.raises(torch.OutOfMemoryError):
            parts = [kept + 1 for _ in range(3)]
        parts = []
        del kept, parts
        torch.empty(1024 * KIB, dtype=torch.uint8, device="sim:1")


def test_cached_blocks_make_room_and_recorded_uses_are_waited_for() -> None:
    side = torch.Stream(device="sim:1")
    with device.capacity(1, 1024 * KIB):
        first = torch.ones(150 * KIB, device="sim:1")
        with torch.accelerator.device_index(1):
            _late_use(first, side)
        first.record_stream(side)
        del first
        torch.empty(200 * KIB, device="sim:1")
        assert device.num_pending(1) == 0


def test_running_out_inside_of_a_kernel_leaves_nothing_behind() -> None:
    before = torch.sim.memory_allocated(1)
    values = torch.ones(256, 256, device="sim:1")
    with device.capacity(1, torch.sim.memory_reserved(1) + 4 * KIB), pytest.raises(torch.OutOfMemoryError):
        torch.linalg.svd(values)
    del values
    assert torch.sim.memory_allocated(1) == before


def test_pinned_memory_is_reused_when_its_copies_have_passed() -> None:
    host = torch.ones(1000, pin_memory=True)
    found = host.to("sim", non_blocking=True)
    del host
    torch.ones(1000, pin_memory=True)
    assert found.sum().item() == 1000


def test_a_running_kernel_gets_no_block_that_another_thread_freed_with_work_pending() -> None:
    """Allocation writes a block in the order of the stream, after a kernel that runs: that may not use it now."""
    is_running, is_freed = threading.Event(), threading.Event()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        is_running.set()
        assert is_freed.wait(60)
        return torch.full_like(x, 2.0)

    def other_thread() -> None:
        assert is_running.wait(60)
        fresh = torch.empty(100, device="sim")  # poisoned once the kernel has ended
        del fresh
        is_freed.set()

    library = torch.library.Library("sim_memory", "FRAGMENT")
    library.define("late(Tensor x) -> Tensor")
    library.impl("late", kernel, "CPU")
    x = torch.ones(100, device="sim")
    thread = threading.Thread(target=other_thread)
    thread.start()
    found = torch.ops.sim_memory.late(x)
    thread.join()
    assert (found == 2).all()
