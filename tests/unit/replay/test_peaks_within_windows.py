"""`Report.peak_bytes` within windows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from internals.references import assert_references_flat
from peaks import sum_of_small_gradients

import actckpt

pytestmark = pytest.mark.usefixtures("no_audit")

NUM = 100


BYTES = 64 * 1024


def test_it_shows_that_a_window_lowers_the_peak_and_not_only_what_is_held(
    windows_from: Callable[[float], None],
) -> None:
    weights = [torch.ones((), requires_grad=True) for _ in range(NUM)]
    peaks = []
    for window_from in (math.inf, 1 << 20):
        windows_from(window_from)
        with actckpt.region() as region:
            total = sum_of_small_gradients(weights, torch.randn(BYTES // 4))
        total.backward()
        peaks.append(region.report().peak_bytes)
        assert region.report().as_dict()["peak_bytes"] == peaks[-1]
        assert "peak so far: " in str(region.report())
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("window_from", [0, math.inf])
def test_replays_give_every_reference_back(window_from: float, windows_from: Callable[[float], None]) -> None:
    windows_from(window_from)
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        with actckpt.region():
            y = x.sin().exp().tanh().cos().sigmoid().exp().sin().sum() + x.sort(0)[0].exp().var(1).sum()
        y.backward()

    assert_references_flat(step)
