"""Which collectives a policy names, and what becomes of them: one process that is a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_device import memory_of
from oracle import CountOperators
from residual_mlp import Mlp
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt.action import Action, SavedTensorInfo
from actckpt.policies import PerOp

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs a torch that is built with gloo"
)

NAME = "_c10d_functional.all_reduce"
#: Modules run in these tests by this name.
PLACE = f"Reduced::{NAME}.default#0.0"


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _all_reduce(x: Tensor) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD.group_name))


def _all_reduce_in_place(x: Tensor) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce_(x.clone(), "sum", dist.group.WORLD.group_name))


class _Through(torch.autograd.Function):
    """A collective in forward, and none in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Reduced(torch.nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor] = _all_reduce) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = _Through.apply(x.sin(), self.run).exp().cos()
        return x


def _train(policy: Any, run: Callable[[Tensor], Tensor] = _all_reduce, **options: Any) -> tuple[int, Any]:
    """Compare with plain autograd; returns how many collectives backward ran, and the report."""
    model = Reduced(run)
    expected, x = (torch.linspace(-1.0, 1.0, 64).requires_grad_() for _ in range(2))
    model(expected).sum().backward()
    with actckpt.region(policy, **options) as region:
        y = model(x)
    report = region.report()
    with CountOperators() as seen:
        y.sum().backward()
    assert x.grad is not None and expected.grad is not None and torch.equal(x.grad, expected.grad)
    return sum(number for name, number in seen.counts.items() if "all_reduce" in name), report


_ALL_REDUCE = torch.ops._c10d_functional.all_reduce
NAMED: dict[str, Any] = {
    "overload": PerOp({_ALL_REDUCE.default: "recompute"}),
    "packet": PerOp({_ALL_REDUCE: Action.RECOMPUTE}),
    "name": PerOp({NAME: "recompute"}),
    "what else is kept": PerOp({NAME: "recompute", "aten.sin": "keep"}),
    "operator in a dict": {_ALL_REDUCE.default: "recompute"},
    "name in a dict": {NAME: "recompute"},
    "pattern of operators": {"_c10d_functional.*": "recompute"},
    "in a module": {f"Reduced::{NAME}": "recompute"},
    "in all modules": {f"**::{NAME}": "recompute"},
    "short name": {"::all_reduce": "recompute"},
}


@pytest.mark.parametrize("policy", NAMED)
def test_an_entry_of_the_operator_repeats_it_once_per_call(policy: str) -> None:
    number, report = _train(NAMED[policy])
    assert number == 2
    kept = [value for value in report.values if value.action is Action.KEEP]
    assert not any(NAME in str(value.place) for value in kept)


def test_an_entry_of_one_place_repeats_that_one() -> None:
    assert _train({PLACE: "recompute"})[0] == _train({f"{NAME}#1": "recompute"})[0] == 1


def _only_collectives(info: SavedTensorInfo) -> Action:
    return Action.RECOMPUTE if str(info.op).startswith(NAME) else Action.KEEP


UNNAMED: dict[str, Any] = {
    "recompute": "recompute",
    "empty list": [],
    "list": ["aten.sin"],
    "default of PerOp": PerOp({"aten.sin": "keep"}),
    "keep in PerOp": PerOp({NAME: "keep"}),
    "module": {"Reduced": "recompute"},
    "all modules": {"**": "recompute"},
    "all operators": {"Reduced::*": "recompute"},
    "a later entry keeps it": {NAME: "recompute", "Reduced": "keep"},
    "a later entry of its module": {NAME: "recompute", "**": "recompute"},
    "function": lambda info: Action.RECOMPUTE,
    "function that asks": _only_collectives,
    "torch, prefer": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
    "torch, must": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
}


@pytest.mark.parametrize("policy", UNNAMED)
def test_nothing_else_repeats_one(policy: str) -> None:
    assert _train(UNNAMED[policy])[0] == 0


def test_the_form_in_place_stays() -> None:
    number, report = _train({"_c10d_functional.*": "recompute"}, _all_reduce_in_place)
    assert number == 0
    assert {value.action for value in report.values if "all_reduce_" in str(value.place)} == {Action.KEEP}


def test_reading_outside_of_a_backward_raises() -> None:
    x = torch.randn(4, requires_grad=True)
    with actckpt.region({NAME: "recompute"}):
        y = _Through.apply(x.sin(), _all_reduce).exp()
    with pytest.raises(actckpt.errors.ActckptError, match="outside of a backward"):
        y.grad_fn._saved_result  # noqa: B018 - reads it
    y.sum().backward()
    assert x.grad is not None


def test_a_backward_inside_of_the_region_repeats_what_it_needs() -> None:
    x = torch.randn(4, requires_grad=True)
    with actckpt.region({NAME: "recompute"}):
        y = _Through.apply(x.sin(), _all_reduce).exp().sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        z = _Through.apply(x.cos(), _all_reduce).exp().sum() + y
    (second,) = torch.autograd.grad(z, x)
    w = x.detach().requires_grad_()
    assert torch.equal(first, torch.autograd.grad(w.sin().exp().sum(), w)[0])
    assert torch.equal(second, torch.autograd.grad(w.cos().exp().sum() + w.sin().exp().sum(), w)[0])


def test_what_backward_changes_of_a_collective_is_not_repeated_but_raises() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            ctx.saved_tensors[0].add_(1.0)
            return gradient

    x = torch.randn(4, requires_grad=True)
    with actckpt.region({NAME: "recompute"}):
        reduced = _Through.apply(x.sin(), _all_reduce)
        y = Spoils.apply(reduced * reduced) + Spoils.apply(reduced)
    with pytest.raises(actckpt.errors.ActckptError, match="modified by an inplace operation"):
        y.sum().backward()


def _written_behind(x: Tensor) -> Tensor:
    with actckpt.region({NAME: "recompute"}):
        y = _Through.apply(x.sin(), _all_reduce) * 2.0
        memory_of(y.detach())[:] = 0.5  # no operator says so
        return y.exp().cos().sum()


def _returned_and_written_behind(x: Tensor) -> Tensor:
    """Write to what the only collective returned."""
    with actckpt.region({NAME: "recompute"}):
        y = _Through.apply(x.sin(), _all_reduce)
        memory_of(y.detach())[:] = 0.5
        return y.sin().sum()


@pytest.mark.parametrize("forward", [_written_behind, _returned_and_written_behind])
def test_a_failed_audit_raises_in_later_steps_too(forward: Callable[[Tensor], Tensor]) -> None:
    for words in ("came back from replay with other bytes", "on all ranks", "on all ranks"):
        with pytest.raises(actckpt.errors.AuditError, match=words):
            forward(torch.randn(4, requires_grad=True)).backward()


def test_a_block_with_a_budget_opens_no_region_that_repeats_one() -> None:
    class Inside(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with actckpt.region({NAME: "recompute"}):
                x = _Through.apply(self.up(x).sin(), _all_reduce).exp().cos()
            return self.down(x)

    model = torch.nn.Sequential(*(Inside(16) for _ in range(4)))
    actckpt.apply(model, activation_budget="80%", race=False)
    with pytest.raises(actckpt.errors.BlocksError, match="Each rank makes a plan of its own"):
        for _ in range(3):
            model(torch.randn(32, 16)).sum().backward()
