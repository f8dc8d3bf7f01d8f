"""Regions around, inside and beside other things that handle saved tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf, mlp
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import actckpt
from actckpt.memory import LiveStorages

Run = Callable[[Any, Tensor], Tensor]


#: Let nothing that is wrong be put right by an audit, nor anything be parked.
pytestmark = pytest.mark.usefixtures("no_audit")


def _in_checkpoint(checkpoint: Any, policy: Any = "recompute") -> Run:
    def body(model: Any, x: Tensor) -> Tensor:
        with actckpt.region(policy):
            return model(x.sin()).sin()

    return lambda model, x: checkpoint(body, model, x, use_reentrant=False)


def test_rule_11_regions_opened_one_in_another_are_bit_equal() -> None:
    def gradients(region: Callable[[], Any]) -> Any:
        torch.manual_seed(3)
        model, x = mlp(8, depth=3, dropout=0.3), leaf(4, 8)
        with ExitStack() as stack:
            y = x
            for layer in model:
                stack.enter_context(region())
                y = layer(y)
        loss = y.square().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True), torch.autograd.grad(loss, x)

    assert_equal(gradients(actckpt.region), gradients(nullcontext))


def _held(run: Run, depth: int = 4) -> int:
    torch.manual_seed(3)
    model = mlp(64, depth=depth)
    x = torch.randn(32, 64, requires_grad=True)
    gc.collect()
    with LiveStorages(parameters=model.parameters()) as live:
        y = run(model, x).sum()
        held = live.live_bytes
        y.backward()
    return held


@pytest.mark.parametrize("checkpoint", [actckpt.checkpoint, torch_checkpoint], ids=["actckpt", "torch"])
@pytest.mark.parametrize("policy", ["recompute", ["aten.addmm"]], ids=["recompute", "list"])
def test_a_region_in_a_checkpoint_holds_no_more_than_the_checkpoint_alone(checkpoint: Any, policy: Any) -> None:
    alone = _held(lambda model, x: checkpoint(lambda t: model(t.sin()).sin(), x, use_reentrant=False))
    assert _held(_in_checkpoint(checkpoint, policy)) <= alone
    assert alone < _held(lambda model, x: model(x.sin()).sin()) / 4


def test_a_region_around_checkpoints_frees_their_inputs() -> None:
    def checkpoints(model: Any, x: Tensor) -> Tensor:
        for layer in model:
            x = actckpt.checkpoint(layer, x)
        return x

    def in_a_region(model: Any, x: Tensor) -> Tensor:
        with actckpt.region():
            return checkpoints(model, x)

    assert _held(in_a_region) <= _held(checkpoints)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_rule_10_a_compiled_function_runs_compiled_in_a_region_and_afterwards() -> None:
    compiles = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def function(t: Tensor) -> Tensor:
        return (t.sin() * t).exp()

    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sin() * x).exp().cos().sum(), x)
    for _ in range(2):
        with actckpt.region():
            y = function(x * 1).cos().sum()
        assert_equal(torch.autograd.grad(y, x), expected)
        assert_equal(torch.autograd.grad(function(x).cos().sum(), x), expected)
    # One graph, and another one where the input is a leaf; torch 2.9 leaves it uncompiled for good.
    assert len(compiles) in ((1, 2) if torch.__version__ >= (2, 10) else (0,))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*:UserWarning")
def test_rule_10_flex_attention_in_a_region() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    found = []
    for context in (nullcontext, actckpt.region):
        torch.manual_seed(3)
        x = torch.randn(1, 2, 16, 8, requires_grad=True)
        with context():
            q, k, v = ((x * number).sin() for number in (1, 2, 3))
            with torch.no_grad():  # its backward needs a GPU, and it looks at requires_grad
                y = flex_attention(
                    q.detach(), k.detach(), v.detach(), score_mod=lambda score, b, h, q, k: score + q - k
                )
            z = (q * y).exp() * v
        found.append((z.detach(), torch.autograd.grad(z.sum(), x)))
    assert_equal(found[1], found[0])
