"""Random modules with state, trained plainly and in every way of actckpt: results, gradients and buffers are equal.

Forwards change buffers, draw random numbers, write in place, take gradients inside, and leave parts without grad.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, assert_equal, in_offload, in_region, ours, plain
from random_programs import seeds
from torch import Tensor, nn

import actckpt

WIDTH = 6


class Block(nn.Module):
    """Runs the named steps, in order."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (WIDTH, WIDTH) to the same."""
        h = x
        for step in self.steps:
            h = STEPS[step](self, x, h)
        return h.tanh()

    def count(self, h: Tensor) -> Tensor:
        """Change a buffer in place, and read it."""
        self.calls += 1
        return h * (1 + 0.1 * self.calls)

    def average_of(self, h: Tensor) -> Tensor:
        """Bind a buffer anew, and read it."""
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h * self.average

    def gradient(self, h: Tensor, wanted: Tensor, *, create_graph: bool) -> Tensor:
        """Add a gradient that is taken inside of the forward."""
        if not (torch.is_grad_enabled() and h.requires_grad and wanted.requires_grad):
            return h
        (found,) = torch.autograd.grad(
            h.square().sum(), wanted, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return h if found is None else h + 0.1 * (found if create_graph else found.detach())

    def without_grad(self, h: Tensor) -> Tensor:
        """Add what runs without grad."""
        with torch.no_grad():
            added = self.linear(h)
        return h + added

    def in_autocast(self, h: Tensor) -> Tensor:
        """Add what runs in a smaller dtype."""
        with torch.autocast(h.device.type, dtype=torch.bfloat16):
            added = self.linear(h)
        return h + added.float()


#: By name: of a block, its input, and what the steps before made.
STEPS: dict[str, Callable[[Block, Tensor, Tensor], Tensor]] = {
    "linear": lambda block, x, h: block.linear(h),
    "tanh": lambda block, x, h: h.tanh(),
    "softmax": lambda block, x, h: h.softmax(-1) * h,
    "dropout": lambda block, x, h: block.dropout(h),
    "noise": lambda block, x, h: h + 0.1 * torch.rand_like(h),
    "layer norm": lambda block, x, h: block.norm(h),
    "batch norm": lambda block, x, h: block.batch_norm(h),
    "buffer in place": lambda block, x, h: block.count(h),
    "buffer bound anew": lambda block, x, h: block.average_of(h),
    "multiply in place": lambda block, x, h: (h * 1.0).mul_(1.5).add_(h),
    "relu in place": lambda block, x, h: (h + 0).relu_(),
    "view": lambda block, x, h: h.reshape(3, 2, WIDTH).transpose(0, 1).reshape(WIDTH, WIDTH),
    "halves": lambda block, x, h: torch.cat([h[:, :3] * h[:, 3:], h[:, 3:].sin()], 1),
    "gradient": lambda block, x, h: block.gradient(h, x, create_graph=False),
    "gradient with a graph": lambda block, x, h: block.gradient(h, x, create_graph=True),
    "gradient of a weight": lambda block, x, h: block.gradient(h, block.linear.weight, create_graph=False),
    "without grad": lambda block, x, h: block.without_grad(h),
    "autocast": lambda block, x, h: block.in_autocast(h),
}


def mixed(info: actckpt.SavedTensorInfo) -> actckpt.Action:
    """Choose an action for each value, as if at random."""
    actions = (actckpt.Action.KEEP, actckpt.Action.RECOMPUTE, actckpt.Action.OFFLOAD)
    return actions[zlib.crc32(f"{info.op} {info.shape} {info.index}".encode()) % len(actions)]


def _nested(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return ours(lambda h: ours(function, h).mul(1.0), x)


#: How each block is called.
CALLS: dict[str, Checkpoint] = {
    "checkpoint": ours,
    "checkpoint of a lambda": lambda block, x: ours(lambda h: block(h), x),
    "checkpoint, offloaded inputs": lambda block, x: ours(block, x, offload_inputs=True),
    "checkpoint, keep matmuls": lambda block, x: ours(block, x, policy="matmuls"),
    "checkpoint, mixed policy": lambda block, x: ours(block, x, policy=mixed),
    "region": in_region(),
    "region, mixed policy": in_region(mixed),
    "offload": in_offload(),
    "checkpoint inside of a region": lambda block, x: in_region("matmuls")(ours, block, x),
    "nested checkpoints": _nested,
}
#: Calls whose blocks have one operator more.
_PLAIN_CALLS: dict[str, Checkpoint] = {"nested checkpoints": lambda block, x: block(x).mul(1.0)}
#: What is applied to the model instead.
APPLIED: dict[str, dict[str, Any]] = {
    "apply": {},
    "apply, keep matmuls": {"policy": "matmuls"},
    "apply, mixed policy": {"policy": mixed},
    "apply, budget": {"activation_budget": "60%"},
}


def _train(blocks: nn.ModuleList, call: Checkpoint, backward: str, seed: int) -> list[Any]:
    results: list[Any] = []
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.05)
    for step in range(3):
        torch.manual_seed(seed + step)
        x = torch.randn(WIDTH, WIDTH).requires_grad_()
        optimizer.zero_grad()
        y = _forward(blocks, call, x)
        if backward == "twice":
            y.square().sum().backward(retain_graph=True)
        elif backward == "of a gradient":
            (inner,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            y = y + inner
        elif backward == "of two forwards":
            y = y * _forward(blocks, call, 1.1 * x)
        y.sum().backward()
        results += [y.detach(), x.grad, [parameter.grad for parameter in blocks.parameters()]]
        results.append([buffer.clone() for buffer in blocks.buffers()])
        optimizer.step()
    return results


def _forward(blocks: nn.ModuleList, call: Checkpoint, x: Tensor) -> Tensor:
    for block in blocks:
        x = call(block, x)
    return x


@pytest.mark.filterwarnings("ignore::actckpt.errors.ActckptWarning")  # of policies and budgets without effect
@pytest.mark.parametrize("way", [*CALLS, *APPLIED])
def test_random_modules_are_bit_equal_to_plain_training(way: str) -> None:
    for seed in seeds():
        drawn = random.Random(seed)
        actckpt.configure(audit="off" if seed % 2 else "first")  # until the fixture of all tests puts it back
        steps = [drawn.choices(list(STEPS), k=drawn.randint(2, 8)) for _ in range(drawn.randint(1, 3))]
        backward = drawn.choice(["once", "twice", "of a gradient", "of two forwards"])
        torch.manual_seed(seed)
        plain_blocks = nn.ModuleList(map(Block, steps))
        blocks = copy.deepcopy(plain_blocks)
        if way in APPLIED:
            actckpt.apply(blocks, blocks=Block, **APPLIED[way])
        expected = _train(plain_blocks, _PLAIN_CALLS.get(way, plain), backward, seed)
        found = _train(blocks, CALLS.get(way, plain), backward, seed)
        assert_equal(found, expected)
