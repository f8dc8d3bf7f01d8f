"""Models that are switched between training and evaluation before backward: reruns compute what the forward did.

Torch's checkpoint reruns in the mode that it finds, so plain training alone is the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from input_routes import MODULE_CALLS
from oracle import Checkpoint, Programs, assert_as_plain, gradients, leaf

programs = Programs()


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


@pytest.mark.parametrize("name", programs)
def test_gradients_and_modes_are_those_of_plain_training(name: str) -> None:
    assert_as_plain(programs[name], with_torch=False)


@programs.each(call=MODULE_CALLS, trains=[True, False], part=[False, True])
def a_mode_that_is_switched_before_backward(checkpoint: Checkpoint, call: Any, trains: bool, part: bool) -> Any:
    block, x = Block().train(trains), leaf(4, 8)
    y = call(checkpoint, block, x)
    (block.scaled if part else block).train(not trains)
    y.sum().backward()
    return x.grad, gradients(block), [module.training for module in block.modules()]


@programs.each(call=MODULE_CALLS)
def a_part_that_is_replaced_and_then_switched_before_backward(checkpoint: Checkpoint, call: Any) -> Any:
    block, x = Block(), leaf(4, 8)
    scaled = block.scaled
    y = call(checkpoint, block, x)
    block.scaled = Scaled()
    scaled.eval()
    y.sum().backward()
    return x.grad, [module.training for module in (*block.modules(), scaled)]


@programs
def forwards_of_both_modes_that_are_alive_at_once(checkpoint: Checkpoint) -> Any:
    block, x = Block(), leaf(4, 8)
    trained = checkpoint(block.train(), x)
    evaluated = checkpoint(block.eval(), x)
    (trained + 2 * evaluated).sum().backward()
    return x.grad


@programs
def a_gradient_inside_after_the_mode_is_switched(checkpoint: Checkpoint) -> Any:
    block, x = Block(), leaf(4, 8)

    class Switches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            y = self.block.scaled(h)
            self.block.eval()
            (inner,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
            return y * inner.detach()

    module = Switches()
    for function in (module, lambda h: module(h)):
        block.train()
        checkpoint(function, x.sin()).sum().backward()
    return x.grad, block.training


@programs
def a_function_that_switches_the_mode(checkpoint: Checkpoint) -> Any:
    block, x = Block(), leaf(4, 8)

    def function(h: torch.Tensor) -> torch.Tensor:
        h = block.scaled(h)
        block.eval()
        return block(h)

    checkpoint(function, x).sum().backward()
    return x.grad, block.training
