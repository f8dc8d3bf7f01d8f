"""The state of a generator is read where replay may need it, and only there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt._core import random_state

_DROPOUT = torch.ops.aten.native_dropout.default


def _loss(x: Tensor) -> Tensor:
    hidden, _ = torch.native_dropout(x.exp(), 0.5, True)
    return (hidden.sin() * hidden).sum()


def _gradient(policy: Any) -> Tensor:
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 64).requires_grad_()
    if policy is None:
        loss = _loss(x)
    else:
        with actckpt.region(policy):
            loss = _loss(x)
    torch.rand(5)  # moves the generator before replay
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    capture = random_state.capture

    def counted(generators: Any) -> Any:
        calls.append(generators)
        return capture(generators)

    monkeypatch.setattr(random_state, "capture", counted)
    return calls


def _as_torch_asks(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is _DROPOUT else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "num_states"),
    [
        ([_DROPOUT], 0),
        ("recompute", 1),
        ([torch.ops.aten.exp.default], 1),
        ({"::aten.native_dropout": "keep"}, 1),  # its results are decided one by one
        (_as_torch_asks, 1),  # after the draw
    ],
)
def test_the_state_is_read_unless_what_was_drawn_stays(captured: list[Any], policy: Any, num_states: int) -> None:
    found = _gradient(policy)
    assert len(captured) == num_states
    assert torch.equal(found, _gradient(None))
