"""Graphs of operators whose values are made from each other, and what a backward over them runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from oracle import CountOperators
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt


def chain(x: Tensor, n: int) -> Tensor:
    """Return a loss that saves n values, each made from one of n that are not saved."""
    loss = x.new_zeros(())
    for _ in range(n):
        x = x + 0.01
        loss = loss + x.exp().sum()
    return loss


def num_replayed(run: Callable[[], object]) -> int:
    """Return how many operators are replayed meanwhile."""
    actckpt.reset_stats()
    run()
    return actckpt.stats().replayed_operators


class RandomGraph:
    """A random graph of operators: branches, several results, in place, random, cut into pieces."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        torch.manual_seed(seed)
        self.leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]

    def forward(self) -> list[Tensor]:
        """Return some results that require grad."""
        rng = random.Random(self._seed)
        torch.manual_seed(self._seed)
        pool: list[Tensor] = [leaf * 1.0 for leaf in self.leaves]
        for _ in range(rng.randint(4, 24)):
            a, b = rng.choice(pool), rng.choice(pool)
            kind = rng.randrange(10)
            if kind == 0:
                pool.append(a + 0.5)
            elif kind == 1:
                pool.append(a * b)
            elif kind == 2:
                pool.append((a + b).exp().clamp(max=2.0))
            elif kind == 3:
                pool.append(torch.cat([part.tanh() for part in (a - b).chunk(4, dim=1)], dim=1))
            elif kind == 4:
                pool.append(F.dropout(a, 0.3))
            elif kind == 5:
                pool.append((a * 0.5).relu_())
            elif kind == 6:
                values, order = a.sort(dim=1)
                pool.append(values * order)
            elif kind == 7:
                pool.append((a + 1).sigmoid())
            elif kind == 8:
                pool.append((a @ b.t()).softmax(-1) @ b)
            else:
                pool.append(F.layer_norm(a, (8,)))
        return [rng.choice(pool).sum() for _ in range(3)]


def _gradients(losses: list[Tensor], leaves: list[Tensor], mode: int) -> list[Any]:
    """Run backward in one of several ways."""
    found: list[Any] = []
    if mode == 0:
        found += torch.autograd.grad(sum(losses[1:], losses[0]), leaves, allow_unused=True)
    elif mode == 1:  # parts of the graph, one after the other
        for loss in losses:
            found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    elif mode == 2:  # for one of the leaves
        found += torch.autograd.grad(losses[0], leaves[:1], retain_graph=True, allow_unused=True)
        found += torch.autograd.grad(losses[1], leaves[1:], allow_unused=True)
    return found


def count(program: RandomGraph, mode: int, region: Any) -> tuple[list[Any], Counter[str], Counter[str], int]:
    """Return gradients, the operators of forward and of backward, and how many backwards ran."""
    with CountOperators() as forward, region:
        losses = program.forward()
    if mode == 3:  # a part of the graph is gone before
        losses[1:] = [loss.detach() for loss in losses[1:]]
        mode = 0
        losses = losses[:1]
    with CountOperators() as backward:
        found = _gradients(losses, program.leaves, mode)
    return found, forward.counts, backward.counts, {0: 1, 1: 3, 2: 2}[mode]
