"""One measured step: comparable between methods, refusing steps that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from actckpt.memory import LiveStorages, measure_step

BATCH, WIDTH, HIDDEN = 8, 16, 32
WIDE_BYTES = BATCH * HIDDEN * 4


def _mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH), torch.nn.ReLU()
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def test_checkpointing_each_of_many_blocks_peaks_lower_than_plain() -> None:
    blocks = [_mlp() for _ in range(8)]
    parameters = [p for block in blocks for p in block.parameters()]
    x = torch.randn(512, WIDTH, requires_grad=True)

    def run(call: Callable[..., torch.Tensor]) -> None:
        h = x
        for block in blocks:
            h = call(block, h)
        h.sum().backward()
        x.grad = None

    plain = measure_step(lambda: run(lambda f, h: f(h)), device="cpu", parameters=parameters)
    saved = measure_step(
        lambda: run(lambda f, h: checkpoint(f, h, use_reentrant=False)), device="cpu", parameters=parameters
    )
    assert saved.peak_bytes < 0.5 * plain.peak_bytes


def test_timeline_starts_at_nothing_and_reaches_the_peak(x: torch.Tensor) -> None:
    model = _mlp()
    step = measure_step(lambda: model(x).sum().backward(), device="cpu", parameters=model.parameters())
    seconds, sizes = zip(*step.timeline, strict=True)
    assert list(seconds) == sorted(seconds)
    assert seconds[0] >= 0
    assert sizes[0] == WIDE_BYTES
    assert max(sizes) == step.peak_bytes
    assert sizes[-1] == 0
    with LiveStorages() as live:
        torch.ones(1)
    assert live.timeline == ()


def test_a_step_that_replaces_gradients_is_refused(x: torch.Tensor) -> None:
    model = _mlp()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    with pytest.raises(ValueError, match=r"replaced 4 of 4 parameter gradients.*Leave zero_grad"):
        measure_step(step, device="cpu", parameters=model.parameters())
