"""What recorders read, decide and audit, where programs show only that gradients are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import assert_equal
from replay_programs import difference, drawn_programs
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt import _C, _bind
from actckpt._core import random_state
from actckpt._replay import audit


@pytest.mark.parametrize("fails", ["in forward", "in backward"])
def test_an_audit_without_memory_for_its_checksum_is_left_out(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def out_of_memory(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        raise torch.OutOfMemoryError("none left")

    right = audit.checksum
    monkeypatch.setattr(audit, "checksum", out_of_memory if fails == "in forward" else right)
    x = torch.randn(13, 3, requires_grad=True)
    with actckpt.region():
        y = x.exp().sin()
    monkeypatch.setattr(audit, "checksum", out_of_memory if fails == "in backward" else right)
    assert_equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.exp().sin().sum(), x)[0])
    assert asked


@pytest.fixture(params=["off", "always"])
def _decided_at_once(request: Any) -> Iterator[None]:
    """Decide candidates (NOTE [ Candidates ]) after every kept value: by default small ones wait for their region."""
    actckpt.configure(audit=request.param)
    _C.connect(_bind.NAMES | {"least_growth_bytes": 0})
    yield
    _C.connect(_bind.NAMES)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("_decided_at_once")
@drawn_programs
def test_random_programs_with_candidates_decided_at_once_are_bit_equal_to_plain_autograd(
    program: list[Any], flags: tuple[bool, ...], mode: int, seed: int
) -> None:
    found = difference(program, flags, mode, seed)
    assert found is None, found


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
