"""`configure(max_inflight=...)`: what is on its way to a store, and what is read ahead, follows the sizes by itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from internals.stores import flush, store_of_kind
from oracle import leaf
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt.memory import LiveStorages


def _layers(num: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: _layers(32, 512), (512, 512)),
    "transformer": (lambda: nn.Sequential(*(Block(256) for _ in range(12))), (4, 256, 256)),
}


def _step(model: nn.Module, x: Tensor, context: Any) -> tuple[int, list[Tensor]]:
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        with context:
            loss = model(x).square().mean()
        loss.backward()
    return live.peak_bytes, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_offload_around_a_whole_model_peaks_at_a_third_of_plain(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    plain, expected = _step(model, x, contextlib.nullcontext())
    for _ in range(2):
        peak, found = _step(model, x, actckpt.offload(min_bytes="64KiB"))
        print(f"{name}: peak {peak / plain:.3f} of {plain / 2**20:.1f} MiB")
        assert peak <= 0.35 * plain
        assert all(map(torch.equal, found, expected))


def test_a_number_stays_the_limit() -> None:
    model, x = _layers(16, 256), torch.randn(512, 256)
    peaks = []
    for limit in ("1MiB", "64MiB"):
        actckpt.configure(max_inflight=limit)
        peaks.append(_step(model, x, actckpt.offload(min_bytes=0))[0])
    assert peaks[0] <= 2**20 + 8 * 512 * 256 * 4
    assert peaks[1] >= 2 * 16 * 512 * 256 * 4  # all of it


def test_a_small_model_is_read_ahead_of_backward() -> None:
    """The windows are small beside it, and large enough for copies to overlap."""
    model, x = _layers(24, 128), torch.randn(256, 128)
    with store_of_kind("disk", window_bytes=None) as store:
        for _ in range(3):
            _step(model, x, actckpt.offload(min_bytes=0))
        shares = [1.0]
        while len(shares) < 10 and min(shares) > 0.25:  # a busy machine may make it late all the same
            before = store.stats()
            for _ in range(3):
                _step(model, x, actckpt.offload(min_bytes=0))
            after = store.stats()
            puts = after.num_puts - before.num_puts
            assert puts >= 3 * 48
            shares.append((after.num_late - before.num_late) / puts)
    assert min(shares) <= 0.25, "more than the first of each step"


@pytest.mark.parametrize("options", [{"offload_inputs": True}, {"policy": "offload"}])
def test_reading_ahead_reaches_into_the_next_block(options: dict[str, Any]) -> None:
    """Each block has a session of its own, and a session reads ahead within itself only."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)),
    )
    actckpt.apply(model, **options)
    for block in model:  # backward takes long, so that what is begun ahead arrives in time
        block.register_forward_hook(lambda _module, _args, y: y.register_hook(lambda _: time.sleep(0.02)) and None)
    behind = []
    with store_of_kind("disk" if on_device.device_type == "cpu" else "memory"):  # there no clock of the machine decides
        while len(behind) < 10 and min(behind, default=3) > 2:  # a busy machine may make it late all the same
            actckpt.reset_stats()
            y = model(leaf(512, 512) * 1)
            flush()
            y.sum().backward()
            figures = actckpt.stats()
            assert figures.prefetched_reloads + figures.late_reloads > 2
            not_ahead = figures.offloaded_bytes // (512 * 512 * 4) - figures.prefetched_reloads
            behind.append(figures.late_reloads if on_device.device_type == "cpu" else not_ahead)
    assert min(behind) <= 2, "only the first could not be known"
