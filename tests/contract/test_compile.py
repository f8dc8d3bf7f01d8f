"""Under torch.compile: torch's checkpoint takes over, in one graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal, gradients, leaf, mlp, ours
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it compiles
        yield
    torch._dynamo.reset()


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_a_region_in_a_compiled_function_stays_in_one_graph() -> None:
    model, x = mlp(), leaf(3, 8)
    y = _compiled(lambda x: ours(model, x.sin()).cos())(x)
    y.sum().backward()
    actual = x.grad, gradients(model)
    x.grad = None
    model.zero_grad()
    expected = model(x.sin()).cos()
    expected.sum().backward()
    assert_equal(y.detach(), expected.detach())
    assert_equal(actual, (x.grad, gradients(model)))


def test_keywords_of_the_function_and_of_checkpoint_are_passed_on() -> None:
    x, m = leaf(3, 8), leaf(3, 8)

    def function(x: torch.Tensor, *, m: torch.Tensor) -> torch.Tensor:
        return (x * m).exp()

    y = _compiled(lambda x, m: ours(function, x, m=m, use_reentrant=False, preserve_rng_state=True))(x, m)
    assert_equal(torch.autograd.grad(y.sum(), (x, m)), torch.autograd.grad(function(x, m=m).sum(), (x, m)))


def test_selective_contexts_are_passed_on() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    model, x = mlp(), leaf(3, 8)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = _compiled(lambda x: ours(model, x, context_fn=contexts))(x)
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad(model(x).sum(), x))


@pytest.mark.parametrize(
    "keywords",
    [{"policy": "offload"}, {"use_reentrant": True}, {"rng_trackers": [object]}],
    ids=lambda keywords: next(iter(keywords)),
)
def test_keywords_that_cannot_be_honoured_raise(keywords: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"cannot be honoured|not supported"):
        _compiled(lambda x: ours(torch.sin, x, **keywords))(leaf(3))


def test_a_compiled_block_inside_a_region_is_bit_equal_to_it_plain() -> None:
    model, x = mlp(), leaf(3, 8)
    compiled = _compiled(model)
    expected = torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()])
    for _ in range(2):
        assert_equal(torch.autograd.grad(ours(compiled, x).sum(), [x, *model.parameters()]), expected)


def test_a_compiled_function_with_tensors_in_its_closure_inside_a_region() -> None:
    x, m = leaf(3), leaf(3)
    compiled = _compiled(lambda x: (x * m).exp())
    expected = torch.autograd.grad((x * m).exp().sum(), (x, m))
    for _ in range(3):
        assert_equal(torch.autograd.grad(ours(compiled, x).sum(), (x, m)), expected)


def test_an_applied_model_compiles_in_one_graph() -> None:
    model = torch.nn.Sequential(mlp(), mlp(), torch.nn.Linear(8, 2))
    x = leaf(3, 8)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert actckpt.apply(model) == ("0", "1")
    assert_equal(torch.autograd.grad(_compiled(model)(x).sum(), [x, *model.parameters()]), expected)


@pytest.mark.parametrize("kind", ["context", "decorator"])
def test_offloading_inside_a_compiled_function_moves_and_is_bit_equal(kind: str) -> None:
    """The graph breaks; the hooks themselves are not compiled, which would warn."""
    model, x = mlp(), leaf(64, 8)

    @actckpt.offload(min_bytes=0)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return model(x).sin()

    def entered(x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload(min_bytes=0):
            return model(x).sin()

    inner = decorated if kind == "decorator" else entered
    compiled = torch.compile(lambda x: inner(x * 2).cos(), backend="aot_eager")
    expected = torch.autograd.grad(model(x * 2).sin().cos().sum(), [x, *model.parameters()])
    for _ in range(3):
        actckpt.reset_stats()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            y = compiled(x)
        assert not [warning for warning in warned if "actckpt" in str(warning.message)]
        assert actckpt.stats().offloaded_bytes > 0
        assert_equal(torch.autograd.grad(y.sum(), [x, *model.parameters()]), expected)


def test_an_applied_model_that_offloads_compiles_with_graph_breaks() -> None:
    model = torch.nn.Sequential(mlp(), mlp(), torch.nn.Linear(8, 2))
    x = leaf(64, 8)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    actckpt.apply(model, policy="offload", min_bytes=0)
    actckpt.reset_stats()
    y = torch.compile(model, backend="aot_eager")(x)
    assert actckpt.stats().offloaded_bytes > 0
    assert_equal(torch.autograd.grad(y.sum(), [x, *model.parameters()]), expected)


def test_offloading_inside_a_full_graph_raises() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload(min_bytes=0):
            return x.sin()

    with pytest.raises(Exception, match=r"(?i)unsupported|offload"):
        _compiled(function)(leaf(3))


@pytest.mark.parametrize("policy", [[torch.ops.aten.addmm], ["aten.addmm"]], ids=str)
def test_an_applied_policy_of_packets_or_names_compiles_to_one_graph(policy: list[Any]) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(mlp(), mlp())
    x = leaf(3, 8)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    actckpt.apply(model, policy=policy)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(torch.autograd.grad(compiled(x).sum(), x)[0], expected)
