"""What stands for collectives while a block is profiled: sizes and integers are those of the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from actckpt._budget.alone import Alone, Exchanges

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
    with Alone(exchanges):
        found = _program("a group that is not there", x)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert torch.equal(found[4], expected[4]) and torch.equal(found[0], x)


def test_other_ranks_send_what_this_one_sends() -> None:
    x = torch.randn(4, 3)
    with Alone(Exchanges()):
        assert torch.equal(functional.all_gather_into_tensor(x, 2, "no group"), torch.cat([x, x]))
        assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 2, "no group"), x[:2])
        assert functional.all_to_all_single(x, [5, 2], [1, 3], "no group").shape == (7, 3)


def test_what_is_not_known_sends_nothing() -> None:
    x = torch.randn(4, 3)
    with Alone(Exchanges()), pytest.raises(NotImplementedError, match=r"all_gather_into_tensor_out.*other ranks"):
        functional.all_gather_into_tensor_out(x, 2, "no group", out=torch.empty(8, 3))
