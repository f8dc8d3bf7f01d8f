"""Steps of training, and whether two runs are equal bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from actckpt.memory import LiveStorages

STEPS = 20
_LET_GO_S = 0.3


def train(model: Any, batch: Mapping[str, Any], steps: int = STEPS) -> list[torch.Tensor]:
    """Train a model of Transformers on one batch."""
    return train_on(model, lambda: model(**batch).loss, steps)


def train_on(model: Any, step: Callable[[], Any], steps: int = STEPS) -> list[torch.Tensor]:
    """Train with AdamW on the loss that `step` computes, and return the losses and then the parameters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal bit for bit."""
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"number {index}"


def held_and_peak(model: Any, step: Callable[[], Any]) -> tuple[int, int]:
    """Return the bytes after the forward and at the peak, of a step whose gradients are there already."""
    step().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    with LiveStorages(parameters=model.parameters()) as live:
        loss = step()
        if torch.distributed.is_initialized():  # gloo's threads let go of what they have sent
            time.sleep(_LET_GO_S)
        held = live.live_bytes
        loss.backward()
    return held, live.peak_bytes
