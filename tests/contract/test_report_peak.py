"""`Report.peak_bytes`: what the values of a region, or of an `offload` block, took at most, as counted by operators."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peaks import sum_of_small_gradients

import actckpt
from actckpt.memory import LiveStorages

NUM = 100
BYTES = 64 * 1024


pytestmark = pytest.mark.usefixtures("no_audit")


CONTEXTS: dict[str, Callable[[], Any]] = {
    "recompute": actckpt.region,
    "keep some": lambda: actckpt.region([torch.ops.aten.sin]),
    "offload": lambda: actckpt.region(
        actckpt.policies.PerOp({torch.ops.aten.exp: actckpt.Action.OFFLOAD}, default=actckpt.Action.RECOMPUTE)
    ),
    "offload all": lambda: actckpt.offload(min_bytes=0),
}


@pytest.mark.parametrize("inflight", ["2MiB", "64MiB"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_it_is_what_operators_made_within_5_percent(name: str, inflight: str) -> None:
    weights = [torch.ones((), requires_grad=True) for _ in range(NUM)]
    x = torch.randn(BYTES // 4)
    actckpt.configure(max_inflight=inflight)
    for _ in range(2):
        gc.collect()
        with LiveStorages(parameters=weights) as live:
            with CONTEXTS[name]() as block:
                total = sum_of_small_gradients(weights, x)
            total.backward()
            del total
        found = block.report().peak_bytes
        assert block.report().as_dict()["peak_bytes"] == found and "peak so far: " in str(block.report())
        print(f"{name}: {found / BYTES:.1f} of {live.peak_bytes / BYTES:.1f} values")
        assert abs(found - live.peak_bytes) <= max(0.05 * live.peak_bytes, 2.1 * BYTES)


def test_offload_reports_what_it_moved_and_what_is_too_small() -> None:
    x = torch.randn(256, 64, requires_grad=True)
    block = actckpt.offload(min_bytes="32KiB")
    assert block.report().rows == ()
    with block as entered:
        assert entered is block
        y = x.sin().sin() + x[:1].sin().sin()
    report = block.report()
    assert (report.offloaded_bytes, report.kept_bytes) == (256 * 64 * 4, 64 * 4)
    assert report.rows[0].not_replayed == {"smaller than min_bytes": 1}
    y.sum().backward()
    assert block.report().offloaded_bytes == 256 * 64 * 4
    assert block.report().peak_bytes >= 256 * 64 * 4
    with actckpt.region("offload") as region:
        torch.randn(1024, 512, requires_grad=True).sin().sin()
    assert region.report().offloaded_bytes == 2 * 2**20


def test_a_region_that_saves_nothing_says_so() -> None:
    with actckpt.offload() as block:
        torch.ones(3).sin()
    assert "Nothing was moved" in str(block.report())


def test_a_report_keeps_nothing_alive() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with LiveStorages() as live:
        with actckpt.region() as region:
            y = x.sin().sin().sum()
        y.backward()
        del y
        assert live.live_bytes == x.nbytes  # its gradient
    assert region.report().peak_bytes >= x.nbytes
