"""Ranks that do not repeat the same collectives raise, and say which rank does what: nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import NUM_RANKS, Ranks
from torch import Tensor, nn
from training import Collectives, check_equal, set_timeout

import actckpt
from actckpt._core import agreement

functional = torch.ops._c10d_functional

_TIMEOUT_S = 2.0
#: Until ranks that compare have raised: they do not wait for a timeout.
_AT_ONCE_S = 20.0


class _Reduced(torch.autograd.Function):
    """The mean over the ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mean(gradient, ctx.group), None


def _mean(x: Tensor, group: Any) -> Tensor:
    total: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group.group_name))
    return total / NUM_RANKS


class _InPlace(torch.autograd.Function):
    """The sum over the ranks by `torch.distributed` itself, which replay never repeats; none in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Block(nn.Module):
    def __init__(self, group: Any, kind: Any = _Reduced) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.group, self.kind = group, kind

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.kind.apply(self.first(x).sin(), self.group).exp().tanh())


#: Of the forward of a block: what the sites of blocks are called.
_LINE = _Block.forward.__code__.co_firstlineno


def _model(kind: Any = _Reduced) -> nn.Sequential:
    group = dist.new_group()
    torch.manual_seed(0)
    return nn.Sequential(*(_Block(group, kind) for _ in range(3)))


def _batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


NAMED = {"_c10d_functional.all_reduce": "recompute"}
#: How blocks run, by a name; None: as they are.
POLICIES: dict[str, Any] = {"none": None, "recompute": "recompute", "[]": [], "named": NAMED, "keep": "keep"}
POLICIES["named in one"] = {"1::_c10d_functional.all_reduce": "recompute"}


def _use(model: nn.Module, policy: str, blocks: Any = _Block) -> None:
    if any("forward" in vars(block) for block in model.children()):
        actckpt.remove(model)
    if policy != "none":
        actckpt.apply(model, policy=POLICIES[policy], blocks=blocks)


class _Raised(NamedTuple):
    kind: str
    text: str
    seconds: float


def _raised(step: Callable[[], object], group: Any, timeout_s: float) -> _Raised:
    dist.barrier()
    set_timeout(group, timeout_s)
    began = time.monotonic()
    try:
        step()
    except Exception as error:
        return _Raised(type(error).__name__, str(error), time.monotonic() - began)
    return _Raised("", "", time.monotonic() - began)


def _changed(before: list[str], after: list[str], kind: Any = _Reduced, timeout_s: float = _TIMEOUT_S) -> _Raised:
    """Train with the first policies, two steps each, then with another one on each rank."""
    model = _model(kind)
    for number, policy in enumerate(before):
        _use(model, policy)
        for step in range(2):
            model(_batch(2 * number + step)).sum().backward()
    _use(model, after[dist.get_rank()])
    loss = model(_batch(100)).sum()
    return _raised(loss.backward, model[0].group, timeout_s)


@pytest.mark.parametrize(
    ("before", "alone"),
    [
        (["named"], "[]"),
        (["named"], "named in one"),
        (["named", "named in one", "named"], "named in one"),
        (["recompute", "named"], "recompute"),
    ],
)
def test_a_rank_whose_policy_changes_alone_raises_and_the_others_say_who_waits(
    before: list[str], alone: str, ranks: Ranks
) -> None:
    stays, changed = ranks.run(_changed, before, [before[-1], alone])
    assert changed.kind == "RanksDifferError" and changed.seconds < _AT_ONCE_S
    assert f"Rank 0 did not come to that point within {_TIMEOUT_S:g} s" in changed.text
    assert stays.kind and stays.seconds < _AT_ONCE_S
    if "recompute" not in before:
        assert stays.kind == "RanksDifferError" and "since they changed what they repeat: rank 1 re" in stays.text
    assert all("Give the same policy to all ranks" in found.text for found in (changed, stays) if "Ranks" in found.kind)


def test_a_rank_that_no_longer_reruns_what_others_rerun_raises(ranks: Ranks) -> None:
    stays, changed = ranks.run(_changed, ["recompute"], ["recompute", "[]"])
    assert (
        changed.kind == "RanksDifferError"
        and f"repeats none in the backward of test_ranks_differ.py:{_LINE} in 2" in changed.text
    )
    assert stays.kind and stays.seconds < _AT_ONCE_S


@pytest.mark.parametrize("kind", [_Reduced, _InPlace])
@pytest.mark.parametrize("other", ["none", "keep", "[]"])
def test_a_rank_that_reruns_what_others_keep_raises(other: str, kind: Any, ranks: Ranks) -> None:
    alone, keeps = ranks.run(_changed, [], ["recompute", other], kind)
    operator = "_c10d_functional.all_reduce.default" if kind is _Reduced else "c10d.allreduce_.default"
    assert alone.kind == "RanksDifferError" and alone.seconds < _AT_ONCE_S
    assert f"rank 0 runs test_ranks_differ.py:{_LINE} in 2 again in backward, and in it {operator}" in alone.text
    assert "Rank 1 did not come to that point" in alone.text
    assert keeps.kind if kind is _Reduced else not keeps.kind  # it exchanges nothing in backward


def test_a_rank_that_reruns_and_one_that_replays_raise_at_once(ranks: Ranks) -> None:
    found = ranks.run(_changed, [], ["recompute", "named"], _Reduced, 30.0)
    assert {each.kind for each in found} == {"RanksDifferError"} and found[0].text == found[1].text
    assert f"rank 0 runs test_ranks_differ.py:{_LINE} in 2 again in backward" in found[0].text
    assert f"rank 1 repeats 1 in the backward of test_ranks_differ.py:{_LINE} in 2" in found[0].text
    assert all(each.seconds < _AT_ONCE_S for each in found)


def _other_blocks() -> _Raised:
    """Each rank reruns another block, and the blocks exchange nothing in backward."""
    model = _model(_InPlace)
    _use(model, "recompute", blocks=["0", "2"][dist.get_rank()])
    loss = model(_batch(0)).sum()
    return _raised(loss.backward, model[0].group, 30.0)


def test_ranks_that_rerun_other_blocks_raise_at_once(ranks: Ranks) -> None:
    found = ranks.run(_other_blocks)
    assert {each.kind for each in found} == {"RanksDifferError"} and found[0].text == found[1].text
    assert "from other places of the forward" in found[0].text and all(each.seconds < _AT_ONCE_S for each in found)


# Ranks that do the same


def _check_same(policies: list[str]) -> list[int]:
    """Change policies on all ranks; returns how many comparisons there were after each two steps."""
    plain, ours = _model(), _model()
    counts = []
    for number, policy in enumerate(policies):
        _use(ours, policy)
        for step in range(2):
            for model in (plain, ours):
                model.zero_grad()
                model(_batch(2 * number + step)).sum().backward()
            check_equal(*([parameter.grad for parameter in model.parameters()] for model in (ours, plain)))
        counts.append(agreement.exchanges_of(ours[0].group).number)
    return counts


def test_ranks_that_change_together_compare_what_is_new_once(ranks: Ranks) -> None:
    policies = ["recompute", "recompute", "named", "[]", "none", "[]", "recompute", "named"]
    assert ranks.run(_check_same, policies) == [[3, 3, 6, 9, 9, 9, 12, 15]] * NUM_RANKS


class _Calling(nn.Sequential):
    """Checkpoints functions that it makes anew at each call."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = actckpt.checkpoint(lambda y, block=block: block(y), x)
        return x


def _check_functions() -> list[int]:
    model = _Calling(*_model())
    numbers = []
    for step in range(3):
        model(_batch(step)).sum().backward()
        numbers.append(agreement.exchanges_of(model[0].group).number)
    return numbers


def test_reruns_of_functions_are_compared_in_the_first_backward_only(ranks: Ranks) -> None:
    assert ranks.run(_check_functions) == [[3, 3, 3]] * NUM_RANKS


class _Sent(torch.autograd.Function):
    """What the first rank sends to the second one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        if dist.get_rank() == 0:
            dist.send(x, 1, group=group)
            return x.clone()
        received = torch.empty_like(x)
        dist.recv(received, 0, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _check_sends() -> int:
    model = _model(_Sent)
    _use(model, "recompute")
    model(_batch(0)).sum().backward()
    return agreement.exchanges_of(model[0].group).number


def test_sends_between_two_ranks_are_not_compared(ranks: Ranks) -> None:
    assert ranks.run(_check_sends) == [0] * NUM_RANKS


def _check_count() -> None:
    actckpt.configure(observers=[Collectives])
    model = _model()
    _use(model, "recompute")
    seen = []
    for step in range(2):
        loss = model(_batch(step)).sum()
        with Collectives() as collectives:
            loss.backward()
        seen.append(collectives.seen)
    assert seen[0] == seen[1] == ["all_reduce"] * 6, seen


def test_comparing_reruns_adds_no_collective(ranks: Ranks) -> None:
    ranks.run(_check_count)
