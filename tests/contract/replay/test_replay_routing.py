"""What decides where data goes stays, whatever the policy: a replay with other bits must not send it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt
from actckpt.errors import RerunMismatchError
from actckpt.memory import LiveStorages

pytestmark = pytest.mark.usefixtures("no_audit")

_WHY = "it says where data goes, or how much of it"
_TOKENS, _EXPERTS = 24, 4
_POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "nothing kept": [],
    "products kept": ["aten.mm"],
    "a dict": {"::aten.mm": "keep"},
    "a function": lambda info: "recompute",
    "a context": lambda ctx, func, *args, **kwargs: torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE,
}


class _Tosser:
    """Adds noise that breaks ties, another one each time: as a sum does that is formed with atomic operations."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, logits: Tensor) -> Tensor:
        self.num_calls += 1
        generator = torch.Generator().manual_seed(self.num_calls)
        noise = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
        return logits + (1e-6 * noise).to(logits)


_toss = _Tosser()


@torch.library.custom_op("actckpt_tests::tossed", mutates_args=())
def _tossed(logits: Tensor) -> Tensor:
    return _toss(logits)


torch.library.register_autograd("actckpt_tests::tossed", lambda ctx, grad: grad)


@torch.library.custom_op("actckpt_tests::counted_in_order", mutates_args=())
def _counted_in_order(x: Tensor) -> Tensor:
    _toss.num_calls += 1
    return x * 2


torch.library.register_autograd("actckpt_tests::counted_in_order", lambda ctx, grad: grad * 2)


@pytest.fixture(autouse=True)
def no_calls() -> None:
    """Begin with the same noise."""
    _toss.num_calls = 0


def _by_where(h: Tensor, logits: Tensor) -> Tensor:
    weights, chosen = logits.softmax(-1).topk(2, -1)
    out = torch.zeros_like(h)
    for expert in range(_EXPERTS):
        tokens, slots = torch.where(chosen == expert)
        out = out.index_add(0, tokens, (h[tokens] * (expert + 1)).sin() * weights[tokens, slots, None])
    return out


def _by_one_hot(h: Tensor, logits: Tensor) -> Tensor:
    mask = F.one_hot(logits.argmax(-1), _EXPERTS).t().bool()
    parts = [(h.masked_select(mask[e][:, None]) * (e + 1)).sin() for e in range(_EXPERTS)]
    return torch.cat([part.square() for part in parts]) * logits.softmax(-1).sum()


def _by_sorting(h: Tensor, logits: Tensor) -> Tensor:
    expert = logits.argmax(-1)
    order = expert.argsort(stable=True)
    sizes = torch.bincount(expert, minlength=_EXPERTS).tolist()
    parts = [(part * (e + 1)).sin() for e, part in enumerate(h.index_select(0, order).split(sizes))]
    return torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), torch.cat(parts)).exp()


def _by_gather(h: Tensor, logits: Tensor) -> Tensor:
    order = logits.sum(-1).argsort()
    picked = h.gather(0, order[: _TOKENS // 2, None].expand(-1, h.shape[1]))
    return torch.index_put(h, (order[_TOKENS // 2 :],), picked.sin()).cos().exp()


def _by_codebook(h: Tensor, logits: Tensor) -> Tensor:
    book = torch.arange(_EXPERTS * 8.0).view(_EXPERTS, 8).cos() + h.mean()
    return (F.embedding(logits.argmax(-1), book) * h).sin()


def _by_labels(h: Tensor, logits: Tensor) -> Tensor:
    """The gradient of a loss by classes that a model gives itself is that of the classes of the forward."""
    return F.cross_entropy(logits * 1.0, logits.argmax(-1))


_ROUTERS = (_by_where, _by_one_hot, _by_sorting, _by_gather, _by_codebook, _by_labels)


def _routed(router: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    h = (x * 1.5).sin()
    logits = _tossed(h @ weight)
    return router(h, logits) + (logits.sin() * logits).sum()


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("router", _ROUTERS)
def test_ties_are_broken_once(router: Callable[[Tensor, Tensor], Tensor], policy: str) -> None:
    """All experts are equally good for all tokens: a replay that asks again sends them elsewhere."""
    x, weight = leaf(_TOKENS, 8), torch.zeros(8, _EXPERTS, requires_grad=True)
    expected = torch.autograd.grad(_routed(router, x, weight).sum(), (x, weight))
    _toss.num_calls = 0
    y = _under(policy, _routed, router, x, weight)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, weight)), expected, rtol=1e-2, atol=1e-2)
    assert _toss.num_calls > 1, "what is real numbers was replayed"


def _under(policy: str, function: Callable[..., Tensor], *args: Any) -> Any:
    if policy != "a context":
        return actckpt.region(_POLICIES[policy])(function)(*args)
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, _POLICIES[policy])
    return actckpt.checkpoint(function, *args, context_fn=contexts)


@pytest.mark.parametrize("router", _ROUTERS)
def test_the_report_says_why(router: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = leaf(_TOKENS, 8), torch.randn(8, _EXPERTS, requires_grad=True)
    expected = torch.autograd.grad(router(x.sin(), x @ weight).sum(), x)
    with actckpt.region([], record=True) as region:
        y = router(x.sin(), x @ weight).sum()
    assert any(_WHY in row.not_replayed for row in region.report().rows)
    assert_equal(torch.autograd.grad(y, x), expected)


def test_an_entry_of_the_policy_wins() -> None:
    x, weight = leaf(_TOKENS, 8), torch.randn(8, _EXPERTS, requires_grad=True)
    expected = torch.autograd.grad(_by_where(x.sin(), x @ weight).sum(), (x, weight))
    with actckpt.region({"::aten.nonzero": "recompute"}, record=True) as region:
        y = _by_where(x.sin(), x @ weight).sum()
    assert_equal(torch.autograd.grad(y, (x, weight)), expected)
    rows = {row.operator: row for row in region.report().rows}
    assert rows["aten.nonzero.default"].num_replays > 0
    assert not rows["aten.topk.default"].recomputed_bytes, "chosen is what they were made of"


def test_masks_of_values_and_indices_of_pooling_route_nothing() -> None:
    x = leaf(2, 3, 8, 8)

    def function(x: Tensor) -> Tensor:
        h = (x * 1.5).sin()
        pooled, places = F.max_pool2d(torch.where(h > 0, h, h * 0.1).relu(), 2, return_indices=True)
        return F.max_unpool2d(pooled.masked_fill(pooled < 0.3, 0.2).exp(), places, 2).sin()

    expected = torch.autograd.grad(function(x).sum(), x)
    with actckpt.region([], record=True) as region:
        y = function(x).sum()
    assert not any(_WHY in row.not_replayed for row in region.report().rows)
    assert_equal(torch.autograd.grad(y, x), expected)


def test_integers_that_nothing_needs_are_released() -> None:
    x = leaf(512, 64)

    def function(x: Tensor) -> Tensor:
        order = x.detach().sum(-1).argsort()
        return x.sin() * float(order[0].item() >= 0)

    with LiveStorages(parameters=[x]) as live:
        y = actckpt.checkpoint(function, x, policy=[])
        held = live.live_bytes - y.untyped_storage().nbytes()
    assert held == 0


def test_operators_with_a_registered_effect_run_once() -> None:
    from torch._higher_order_ops import effects

    overload = torch.ops.actckpt_tests.counted_in_order.default
    effects._register_effectful_op(overload, effects._EffectType.ORDERED)
    try:
        x = leaf(8)
        y = actckpt.checkpoint(lambda x: _counted_in_order(x.sin()).cos().exp(), x, policy=[])
        (found,) = torch.autograd.grad(y.sum(), x)
    finally:
        if hasattr(effects, "_deregister_effectful_op"):  # torch 2.9
            effects._deregister_effectful_op(overload)
        else:
            effects._register_effectful_op(overload, None)
    assert _toss.num_calls == 1
    assert_equal(found, torch.autograd.grad((x.sin() * 2).cos().exp().sum(), x)[0])


class _Mixture(nn.Module):
    """Two tokens in three have equally good experts."""

    def __init__(self, width: int = 32, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        is_tied = torch.arange(len(x))[:, None] % 3 > 0
        weights, chosen = self.gate(x).masked_fill(is_tied, 0.0).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == number)
            out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slots, None])
        return x + out


def _step(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    y = model(x) if not options else actckpt.checkpoint(model, x, **options)
    return torch.autograd.grad(y.square().mean(), (x, *model.parameters()))


@pytest.mark.parametrize("num_steps", [20, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("options", [{"policy": []}, {"policy": "matmuls"}, {"policy": "recompute"}])
def test_ties_and_other_numbers_of_threads_in_backward(options: dict[str, Any], num_steps: int) -> None:
    model = nn.Sequential(_Mixture(), _Mixture())
    for step in range(num_steps):
        x = leaf(48, 32)
        torch.set_num_threads(1 + step % 2)
        expected = _step(model, x)
        y = actckpt.checkpoint(model, x, **options).square().mean()
        torch.set_num_threads(2 - step % 2)
        found = torch.autograd.grad(y, (x, *model.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_plans_do_not_recompute_what_routes() -> None:
    model, x = nn.Sequential(*(_Mixture() for _ in range(4))), torch.randn(48, 32)
    expected = torch.autograd.grad(model(x).square().mean(), tuple(model.parameters()))
    actckpt.apply(model, blocks=_Mixture, activation_budget="60%", race=False)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        assert_equal(tuple(parameter.grad for parameter in model.parameters()), expected)
    plan = actckpt.report(model).plan
    assert plan is not None
    found = [value for block in plan.costs.blocks for value in block.values if "::aten.nonzero" in value.name]
    assert len(found) == 16 and not any(value.replayable for value in found)


def test_it_costs_little_memory() -> None:
    model, x = _Mixture(256), torch.randn(512, 256, requires_grad=True)
    held = {}
    for name, policy in {"plain": "keep", "kept": ["aten.addmm"]}.items():
        with LiveStorages(parameters=[x, *model.parameters()]) as live, actckpt.region(policy, record=True) as region:
            y = model(x)
        held[name] = live.live_bytes
        of_routing = sum(row.kept_bytes for row in region.report().rows if _WHY in row.not_replayed)
        del y
    assert 0 < of_routing <= 0.01 * held["plain"]


def test_a_rerun_that_routes_otherwise_names_the_router() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            chosen = _tossed(x * 0.0).argmax(-1)
            return torch.cat([(x[chosen == expert] * (expert + 1)).sin().exp() for expert in range(4)])

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Router()))
    y = actckpt.checkpoint(model, torch.randn(_TOKENS, 4))
    with pytest.raises(RerunMismatchError, match=r"module 1\.0, Router.*\n.*Only sizes differ.*router") as raised:
        y.sum().backward()
    assert "test_replay_routing.py" in str(raised.value)
