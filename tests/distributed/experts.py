"""Experts on other ranks: how many tokens go where depends on their values, and they travel by all-to-all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from budget_programs import Net
from pool import NUM_RANKS
from torch import Tensor, nn
from training import Method, Training, batch


class Experts(nn.Module):
    """A block whose tokens go to the expert that a router picks, one expert per rank."""

    is_block = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, NUM_RANKS, bias=False)
        self.expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=NUM_RANKS)
        received = torch.ops._c10d_functional.wait_tensor(all_to_all_single(sent, None, None, dist.group.WORLD))
        splits: tuple[Any, Any] = received.tolist(), sent.tolist()
        arrived = all_to_all_single_autograd(tokens[order], *splits, dist.group.WORLD)
        back = all_to_all_single_autograd(self.expert(arrived), *reversed(splits), dist.group.WORLD)
        return x + (weights.unsqueeze(-1) * back[order.argsort()]).view_as(x)


#: Of four blocks: which expert each of 32 tokens has, their order and the way back; how many are sent and received.
ROUTING_BYTES = 4 * 8 * (3 * 32 + 2 * NUM_RANKS)


def _experts(method: Method) -> Training:
    torch.manual_seed(1 + dist.get_rank())  # each rank has experts of its own, and trains all on its own tokens
    run = lambda net, x: functools.reduce(lambda x, block: block(x), net.blocks, net.first(x))  # noqa: E731
    model = Net(run, [Experts(32) for _ in range(4)], first=nn.Linear(8, 32))
    method(model)
    return Training(lambda: list(model.parameters()), lambda step: model(batch(step)).square().mean())


KINDS: dict[str, Callable[[Method], Training]] = {"experts": _experts}
