"""Models that are switched between training and evaluation before backward: reruns compute what the forward did.

Torch's checkpoint reruns in the mode that it finds, so that its gradients are others: here plain training alone is the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from input_routes import MODULE_CALLS
from oracle import Checkpoint, assert_equal, ours, plain

import actckpt


class Scaled(torch.nn.Module):
    """Computes something else in training, with as many saved tensors of the same shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * (3 if self.training else 2)).exp()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.dropout, self.linear = Scaled(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.dropout(self.scaled(x))).tanh()


Call = Callable[[Checkpoint, Block, torch.Tensor], torch.Tensor]


def _applied(checkpoint: Checkpoint, block: Block, x: torch.Tensor) -> torch.Tensor:
    if checkpoint is not ours:
        return block(x)
    model = torch.nn.Sequential(block)
    actckpt.apply(model, blocks=["0"])
    try:
        found: torch.Tensor = model(x)
    finally:
        actckpt.remove(model)
    return found


CALLS: dict[str, Call] = MODULE_CALLS | {"applied": _applied}


def _modes(block: Block) -> list[bool]:
    return [module.training for module in block.modules()]


def _gradients(checkpoint: Checkpoint, call: Call, *, trains: bool, part: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    block = Block().train(trains)
    x = torch.randn(4, 8, requires_grad=True)
    y = call(checkpoint, block, x)
    (block.scaled if part else block).train(not trains)
    modes = _modes(block)
    y.sum().backward()
    assert _modes(block) == modes
    found = [x.grad, *(parameter.grad for parameter in block.parameters())]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("trains", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mode_that_is_switched_before_backward(call: Call, trains: bool, part: bool) -> None:
    expected = _gradients(plain, call, trains=trains, part=part)
    found = _gradients(ours, call, trains=trains, part=part)
    assert len(found) == len(expected) == 3
    for ours_, plain_ in zip(found, expected, strict=True):
        assert_equal(ours_, plain_)


def test_forwards_of_both_modes_that_are_alive_at_once() -> None:
    def gradient(checkpoint: Checkpoint) -> torch.Tensor:
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(4, 8, requires_grad=True)
        trained = checkpoint(block.train(), x)
        evaluated = checkpoint(block.eval(), x)
        (trained + 2 * evaluated).sum().backward()
        assert x.grad is not None
        return x.grad

    assert_equal(gradient(ours), gradient(plain))


def test_a_function_that_switches_the_mode() -> None:
    def gradient(checkpoint: Checkpoint) -> tuple[torch.Tensor, bool]:
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(4, 8, requires_grad=True)

        def function(h: torch.Tensor) -> torch.Tensor:
            h = block.scaled(h)
            block.eval()
            return block(h)

        checkpoint(function, x).sum().backward()
        assert x.grad is not None
        return x.grad, block.training

    (ours_, ours_mode), (plain_, plain_mode) = gradient(ours), gradient(plain)
    assert_equal(ours_, plain_)
    assert ours_mode is plain_mode


def test_replay_runs_no_module_again() -> None:
    def gradient(checkpoint: Checkpoint) -> torch.Tensor:
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(4, 8, requires_grad=True)
        y = checkpoint(block, x)
        block.eval()
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert_equal(gradient(partial(actckpt.checkpoint, policy=[])), gradient(plain))
