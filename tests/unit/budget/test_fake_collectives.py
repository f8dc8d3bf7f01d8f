"""What stands for collectives while a block is profiled: sizes and integers are those of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import actckpt
from actckpt._budget.fake_collectives import Exchanges, FakeCollectives
from actckpt._core import torch_private

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="a torch that is built without distributed")
functional = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """The name of a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def _program(group: str, x: torch.Tensor) -> list[torch.Tensor]:
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_into_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 1, group),
        functional.all_to_all_single(x, [4], [4], group),
        functional.all_to_all_single(torch.arange(3), [3], [3], group),
        functional.broadcast(x, 0, group),
        *functional.all_reduce_coalesced([x, x[:2]], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x[:2]], 1, group),
        *functional.reduce_scatter_tensor_coalesced([x, x[:2]], "sum", 1, group),
    ]
    return [functional.wait_tensor(tensor) for tensor in found]


def test_results_have_the_shapes_and_integers_of_collectives(group: str) -> None:
    x = torch.randn(4, 3)
    with Exchanges() as exchanges:
        expected = _program(group, x)
    exchanges.close()
    assert len(exchanges.integers) == 9 and torch.equal(exchanges.integers[4][0], torch.arange(3))
    with FakeCollectives(exchanges):
        found = _program("a group that is not there", x)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert torch.equal(found[4], expected[4]) and torch.equal(found[0], x)


def test_other_ranks_send_what_this_one_sends() -> None:
    x = torch.randn(4, 3)
    with FakeCollectives(Exchanges()):
        assert torch.equal(functional.all_gather_into_tensor(x, 2, "no group"), torch.cat([x, x]))
        assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 2, "no group"), x[:2])
        assert functional.all_to_all_single(x, [5, 2], [1, 3], "no group").shape == (7, 3)


def test_what_is_not_known_sends_nothing() -> None:
    x = torch.randn(4, 3)
    with (
        FakeCollectives(Exchanges()),
        pytest.raises(NotImplementedError, match=r"all_gather_into_tensor_out.*other ranks"),
    ):
        functional.all_gather_into_tensor_out(x, 2, "no group", out=torch.empty(8, 3))


class _Exchanging(torch.autograd.Function):
    """Sums over ranks in forward, in backward, or in neither."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str, group: str) -> torch.Tensor:
        ctx.where, ctx.group = where, group
        return functional.wait_tensor(functional.all_reduce(x, "sum", group)) if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.where == "backward":
            gradient = functional.wait_tensor(functional.all_reduce(gradient, "sum", ctx.group))
        return gradient, None, None


class _Block(torch.nn.Module):
    def __init__(self, where: str, group: str) -> None:
        super().__init__()
        self.linear, self.where, self.group = torch.nn.Linear(8, 8), where, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Exchanging.apply(self.linear(x).sin(), self.where, self.group)
        return result.cos()


@pytest.mark.parametrize("where", ["forward", "backward", "neither"])
def test_the_first_step_of_a_budget_exchanges_what_plain_training_does(where: str, group: str) -> None:
    """Of the default group of one rank nothing says that others are not there: groups can be made by hand."""
    model = torch.nn.Sequential(*(_Block(where, group) for _ in range(3)))
    x = torch.randn(4, 8)

    def num_exchanged() -> int:
        before = torch_private.num_operations(dist.group.WORLD)
        model(x).sum().backward()
        after = torch_private.num_operations(dist.group.WORLD)
        assert before is not None and after is not None
        return after - before

    plain = num_exchanged()
    assert plain == (0 if where == "neither" else 3)
    actckpt.apply(model, blocks=_Block, activation_budget="2GiB", race=False)
    assert num_exchanged() == plain
