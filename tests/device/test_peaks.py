"""Peaks by the allocator of a device, beside those that `LiveStorages` counts."""

from __future__ import annotations

import demo_training
import pytest
import torch
from demo_training import METHODS, Training
from torch.nn import functional

import actckpt
from actckpt.memory import LiveStorages, measure_step


def _figures(method: str) -> tuple[int, int]:
    """Return the peak of a step as the allocator and as `LiveStorages` tell it, without what was there before."""
    training = Training(METHODS[method])
    for _ in range(2):  # the first step is audited, the second one may be read ahead
        training.step()
    assert (actckpt.stats().offloaded_bytes > 0) == ("offload" in method)
    before_bytes = demo_training.start_peak()
    with LiveStorages(device="sim", parameters=training.model.parameters()) as live:
        training.step()
    return torch.accelerator.max_memory_allocated() - before_bytes, live.peak_bytes


@pytest.mark.parametrize("method", METHODS)
def test_the_allocators_peak_is_that_of_live_storages(method: str) -> None:
    allocated, counted = _figures(method)
    assert allocated == pytest.approx(counted, rel=0.01)
    assert allocated >= counted, "the allocator rounds up"


def test_each_method_needs_less_than_the_one_before() -> None:
    peaks = {method: _figures(method)[0] for method in METHODS}
    assert peaks["offload"] < 0.25 * peaks["plain"]
    assert peaks["offloaded inputs"] < peaks["rerun"] <= peaks["replay"] < 0.25 * peaks["plain"]
    inputs = 8 * demo_training.INPUT_BYTES
    less = peaks["rerun"] - peaks["offloaded inputs"]
    # Two windows, the input that is used, and one that leaves.
    assert inputs - 2 * demo_training.WINDOW_BYTES - 2 * demo_training.INPUT_BYTES <= less <= inputs


def test_a_workspace_counts_in_the_allocators_peak_only() -> None:
    """What an operator allocates for itself, and frees before it returns, no dispatch mode sees."""
    query = torch.randn(1, 2, 64, 32, device="sim")
    before_bytes = demo_training.start_peak()
    with LiveStorages(device="sim") as live:
        found = functional.scaled_dot_product_attention(query, query, query)
    allocated = torch.accelerator.max_memory_allocated() - before_bytes
    assert torch.accelerator.memory_allocated() - before_bytes >= found.nbytes
    assert live.peak_bytes < allocated
    # By `measure_step`, which uses the allocator where there is one, it counts.
    measured = measure_step(
        lambda: functional.scaled_dot_product_attention(query, query, query), device="sim", parameters=()
    )
    assert measured.peak_bytes == allocated
