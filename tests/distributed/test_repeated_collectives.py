"""Policies that name collectives to be recomputed: replay repeats them, on all ranks alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import experts
import model_parallel
import pytest
import torch
import torch.distributed as dist
from pool import NUM_RANKS, Ranks, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import SAVED, Collectives, Found, Method, applied, check_equal, reference, train

import actckpt
from actckpt import _C, _bind
from actckpt._core import pressure
from actckpt._replay import windows

functional = torch.ops._c10d_functional

COLLECTIVES = (
    functional.all_gather_into_tensor,
    functional.reduce_scatter_tensor,
    functional.all_reduce,
    functional.all_to_all_single,
)
NAMED = dict.fromkeys(COLLECTIVES, "recompute")
POLICIES: dict[str, Any] = {
    "everything": actckpt.policies.PerOp(NAMED),
    "list": actckpt.policies.PerOp({**dict.fromkeys(SAVED, "keep"), **NAMED}),
    "selectors": {"_c10d_functional.*": "recompute"},
}
#: Which of torch's methods recomputes the same.
LIKE = {"everything": "rerun", "list": "list", "selectors": "rerun"}
MODULES = {
    "tensor parallel": model_parallel,
    "sequence parallel": model_parallel,
    "experts": experts,
}


def _trained(kind: str, method: Method) -> Found:
    module = MODULES[kind]
    found = train(module.KINDS[kind], method, 3)
    plain = reference(module.__name__, kind, "plain")
    check_equal(found.gradients, plain.gradients)
    assert found.in_forward == plain.in_forward and len(found.in_backward) > len(plain.in_backward)
    return found


def _check_like_torch(kind: str, policy: str) -> tuple[str, ...]:
    found = _trained(kind, applied(POLICIES[policy]))
    theirs = reference(MODULES[kind].__name__, kind, LIKE[policy])
    assert len(found.in_backward) <= len(theirs.in_backward)
    if kind == "experts":  # what says where tokens go stays; their number is new in each step, and audited
        assert found.held_bytes <= 1.01 * theirs.held_bytes + experts.ROUTING_BYTES
    else:
        assert found.held_bytes <= theirs.held_bytes
        assert found.peak_bytes <= 1.1 * theirs.peak_bytes  # what gloo's threads have sent dies when they like
    return found.in_backward


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_equal_and_no_more_is_held_or_repeated_than_by_torch(
    kind: str, policy: str, ranks: Ranks
) -> None:
    assert len(set(ranks.run(_check_like_torch, kind, policy))) == 1


# What one rank does alone


def _without_room(model: nn.Module) -> None:
    """Let the second rank keep as little of a replay as it can."""
    if dist.get_rank() != 1:
        return
    windows.LEAST_GAIN = 1
    _C.connect(_bind.NAMES | {"small_window_bytes": 0})
    for parameter in model.parameters():
        parameter.register_hook(lambda _: pressure.release(1 << 40) and None)


def _check_memory_changes_nothing(kind: str) -> tuple[str, ...]:
    def method(model: nn.Module) -> None:
        applied(POLICIES["everything"])(model)
        _without_room(model)

    found = _trained(kind, method)
    assert found.in_backward == _trained(kind, applied(POLICIES["everything"])).in_backward
    return found.in_backward


@pytest.mark.parametrize("kind", MODULES)
def test_windows_and_calls_for_room_on_one_rank_change_no_collective(kind: str, ranks: Ranks) -> None:
    assert len(set(ranks.run(_check_memory_changes_nothing, kind))) == 1


# One region, by hand

GATHER, SCATTER = "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"


def _block(x: Tensor, first: Tensor, second: Tensor, group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

    gathered = all_gather_tensor_autograd(x.sin(), 0, group)
    y = reduce_scatter_tensor_autograd((gathered @ first).tanh() @ second, "sum", 0, group)
    return (x + y).exp().tanh().sum()


def _inputs(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    return [torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(3)]


def _in_region(policy: Any, function: Callable[..., Tensor] = _block) -> Callable[..., Tensor]:
    return actckpt.region(policy)(function)  # type: ignore[no-any-return]


_BOTH = {GATHER: "recompute", SCATTER: "recompute"}


class _Coalesced(torch.autograd.Function):
    """Several tensors by one collective of each form, and none in backward."""

    @staticmethod
    def forward(ctx: Any, group: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = functional.all_gather_into_tensor_coalesced(list(inputs), NUM_RANKS, group)
        results = functional.all_reduce_coalesced([functional.wait_tensor(x) for x in results], "sum", group)
        halves = [functional.wait_tensor(x) for x in results]
        results = functional.reduce_scatter_tensor_coalesced(halves, "sum", NUM_RANKS, group)
        return tuple(functional.wait_tensor(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *gradients


def _several(x: Tensor, first: Tensor, second: Tensor, group: Any) -> Tensor:
    y, z, _ = _Coalesced.apply(group.group_name, x.sin(), first.cos(), second)
    return (y.exp().tanh() * 2.0).sum() + (z.exp() * y).cos().sum() + second.sum()


_SEVERAL = {f"_c10d_functional.{name}_coalesced": "recompute" for name in ("all_reduce", "all_gather_into_tensor")}
_SEVERAL["_c10d_functional.reduce_scatter_tensor_coalesced"] = "recompute"


def _twice(call: Callable[..., Tensor]) -> tuple[list[Tensor], list[str]]:
    actckpt.configure(observers=[Collectives])  # else replay runs without it
    inputs = _inputs()
    loss = call(*inputs, dist.group.WORLD)
    with Collectives() as seen:
        loss.backward(retain_graph=True)
        loss.backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None], seen.seen


@pytest.mark.parametrize(("function", "policy"), [(_block, _BOTH), (_several, _SEVERAL)])
@on_ranks
def test_each_of_two_backwards_repeats_them_once(function: Callable[..., Tensor], policy: dict[str, str]) -> None:
    plain, _ = _twice(function)
    theirs, in_backward = _twice(functools.partial(checkpoint, function, use_reentrant=False))
    found, seen = _twice(_in_region(policy, function))
    check_equal(found, plain)
    check_equal(found, theirs)
    assert seen == in_backward
    assert function is _block or len(seen) == 2 * 3


def _interleaved(call: Callable[..., Tensor]) -> list[Tensor]:
    batches = [_inputs(seed) for seed in (1, 2, 3)]
    losses = [call(*inputs, dist.group.WORLD) for inputs in batches]
    for number in (1, 2, 0):
        losses[number].backward()
    return [tensor.grad for inputs in batches for tensor in inputs if tensor.grad is not None]


@on_ranks
def test_micro_batches_may_run_backward_in_another_order() -> None:
    check_equal(_interleaved(_in_region(_BOTH)), _interleaved(_block))


@on_ranks
def test_parts_of_a_graph_repeat_what_they_need() -> None:
    """Take the gradients one after another, and a part of the graph twice."""
    plain, ours = _inputs(), _inputs()
    losses = _block(*plain, dist.group.WORLD), _in_region(_BOTH)(*ours, dist.group.WORLD)
    for number in (2, 1, 2, 0):
        expected, found = (
            torch.autograd.grad(loss, inputs[number], retain_graph=True)
            for loss, inputs in zip(losses, (plain, ours), strict=True)
        )
        assert torch.equal(found[0], expected[0])


# Policies that change


_ALL_REDUCE = {"_c10d_functional.all_reduce": "recompute"}


class _Reduced(torch.autograd.Function):
    """The mean over the ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _mean(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _mean(gradient)


def _mean(x: Tensor) -> Tensor:
    total: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD.group_name))
    return total / NUM_RANKS


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(_Reduced.apply(self.first(x).sin()).exp().tanh())


class _Calling(nn.Sequential):
    """Checkpoints functions that it makes anew at each call."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = actckpt.checkpoint(lambda y, block=block: block(y), x)
        return x


def _model(kind: type[nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*(_Block() for _ in range(3)))


@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        (nn.Sequential, ["recompute", "recompute", _ALL_REDUCE, [], None, [], "recompute", _ALL_REDUCE]),
        (_Calling, [None]),
    ],
)
@on_ranks
def test_ranks_may_change_what_they_recompute_together(kind: type[nn.Sequential], policies: list[Any]) -> None:
    """Train two steps with each of the policies, on all ranks."""
    plain, ours = _model(nn.Sequential), _model(kind)
    for number, policy in enumerate(policies):
        if policy is not None:
            actckpt.apply(ours, policy=policy, blocks=_Block)
        for step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(20 * number + 10 * step + dist.get_rank()))
            for model in (plain, ours):
                model.zero_grad()
                model(x).sum().backward()
            check_equal(*([parameter.grad for parameter in model.parameters()] for model in (ours, plain)))
        if policy is not None:
            actckpt.remove(ours)
