"""A rerun that runs out of memory on one rank runs once more there, unless it communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import NUM_RANKS, Ranks, on_ranks
from torch import Tensor, nn
from training import check_equal

import actckpt
from actckpt._core import rescue


def _reduce(x: Tensor) -> None:
    dist.all_reduce(x)


def _exchange(x: Tensor) -> None:
    other, received = 1 - dist.get_rank(), torch.empty_like(x)
    requests = [dist.isend(x, other), dist.irecv(received, other)]
    for request in requests:
        assert request is not None
        request.wait()
    x.add_(received)


class _Communicate(torch.autograd.Function):
    """The sum over the ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], None]) -> Tensor:
        x, ctx.run = x.clone(), run
        run(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        ctx.run(gradient)
        return gradient, None


class _Block(nn.Module):
    """Its second call, which is the rerun, runs out of memory `"before"` or `"after"` it communicates."""

    def __init__(self, failing: str = "", run: Callable[[Tensor], None] = _reduce) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.failing, self.run, self.num_calls = failing, run, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self._fail("before")
        x = _Communicate.apply(torch.dropout(self.first(x).sin(), 0.2, True), self.run)
        self._fail("after")
        return x + self.second(x.tanh())

    def _fail(self, where: str) -> None:
        if self.failing == where and self.num_calls == 2:
            raise torch.OutOfMemoryError(f"no memory left {where}")


def _gradients(failing: _Block) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), failing)
    for parameter in failing.parameters():
        nn.init.normal_(parameter)
    actckpt.apply(model, blocks=_Block)
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(4, 8)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _runs_once_more_on_one_rank() -> None:
    expected = _gradients(_Block())
    block = _Block("before" if dist.get_rank() == 1 else "")
    check_equal(_gradients(block), expected)
    assert block.num_calls == 2 + dist.get_rank()


@pytest.mark.parametrize("run", [_reduce, _exchange])
@on_ranks
def test_a_rerun_that_communicated_does_not_run_once_more(run: Callable[[Tensor], None]) -> None:
    block = _Block("after", run)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left after"):
        _gradients(block)
    assert block.num_calls == 2


@on_ranks
def test_no_rerun_runs_once_more_where_sends_are_not_counted() -> None:
    groups = dist.distributed_c10d._world.pg_map
    with pytest.MonkeyPatch.context() as patch:
        for group, (_, store) in list(groups.items()):
            patch.setitem(groups, group, ("cpu:gloo,cuda:nccl", store))
        assert set(rescue.num_operations()) == {None}
        block = _Block("before")
        with pytest.raises(torch.OutOfMemoryError, match="no memory left before"):
            _gradients(block)
    assert block.num_calls == 2


def test_a_rerun_runs_once_more_on_one_rank_before_its_collective(ranks: Ranks) -> None:
    assert NUM_RANKS == 2
    ranks.run(_runs_once_more_on_one_rank)
