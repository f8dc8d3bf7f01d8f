"""Backwards that run several times, in part, or not at all, through TransformerEngine's own nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor

import actckpt
from te_on_cpu import training
from te_on_cpu.training import RECIPES


def _model(te: Any) -> torch.nn.ModuleList:
    training.reset()
    torch.manual_seed(3)
    return torch.nn.ModuleList(training.make_layer(te, "TransformerLayer") for _ in range(2))


def _forward(te: Any, model: Any, recipe: str, call: Any = training.plain) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    x, recipe_ = training.make_input(torch.float32, 1), training.make_recipe(recipe)
    with te.autocast(recipe_ is not None, recipe=recipe_):
        h = x * 1.0
        for layer in model:
            h = call(layer, h)
    return x, h.square().mean()


def _put_back(model: torch.nn.Module, before: dict[str, Any]) -> None:
    """Undo the updates of scales that a backward makes."""
    for name, module in model.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(key)
            if hasattr(state, "amax_history"):
                state.amax_history.copy_(before[f"scales: {name} {key} history"])
                state.scale.copy_(before[f"scales: {name} {key} scale"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "policy", ["recompute", "offload", {"core_attention": "recompute", "proj": "offload"}], ids=str
)
def test_every_backward_of_a_wrapped_model_gives_the_same_gradients(te: Any, policy: Any, recipe: str) -> None:
    model = _model(te)
    x, loss = _forward(te, model, recipe)
    expected = torch.autograd.grad(loss, [x, *model.parameters()])

    model = _model(te)
    actckpt.te.wrap(model, policy, retain_graph=True, min_bytes=0)
    actckpt.reset_stats()
    x, loss = _forward(te, model, recipe)
    assert (actckpt.stats().offloaded_bytes > 0) == (policy != "recompute")
    before = training.scales(model)
    for _ in range(3):
        assert_equal(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True), expected)
        _put_back(model, before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("theirs", [False, True])
def test_without_wrap_transformer_engines_nodes_run_once(te: Any, recipe: str, theirs: bool) -> None:
    _, loss = _forward(te, _model(te), recipe, te.checkpoint if theirs else actckpt.checkpoint)
    loss.backward(retain_graph=True)
    with pytest.raises((AttributeError, RuntimeError, TypeError, IndexError, AssertionError, ValueError)):
        loss.backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_through_part_of_the_model(te: Any, recipe: str) -> None:
    def run(call: Any) -> list[Any]:
        model = _model(te)
        _, loss = _forward(te, model, recipe, call)
        grads = torch.autograd.grad(loss, list(model[1].parameters()))
        _, loss = _forward(te, model, recipe, call)  # the first region of those before was not rerun
        queued = training.process_state()["process: queued"]
        return [*grads, *torch.autograd.grad(loss, list(model.parameters())), queued]

    assert_equal(run(actckpt.checkpoint), run(training.plain))


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_outputs_of_a_region_backwards_one_by_one(te: Any, recipe: str) -> None:
    def run(call: Any) -> list[Any]:
        model = _model(te)
        torch.manual_seed(5)
        x, recipe_ = training.make_input(torch.float32, 1), training.make_recipe(recipe)

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            return model[0](x), model[1](x)

        with te.autocast(recipe_ is not None, recipe=recipe_):
            first, second = call(both, x)
        second.square().mean().backward()
        first.square().mean().backward()
        state = {**training.scales(model), **training.process_state()}
        return [x.grad, *(parameter.grad for parameter in model.parameters()), state]

    assert_equal(run(actckpt.checkpoint), run(lambda function, x: function(x)))
