"""Parameters that are quantized themselves (`quantized_model_init`), which an optimizer changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_equal

import actckpt
from actckpt.errors import CheckpointError
from te_on_cpu import training
from te_on_cpu.methods import METHODS, How


def _train(te: Any, kind: str, recipe: str, how: How) -> list[Any]:
    training.reset()
    torch.manual_seed(3)
    recipe_ = training.make_recipe(recipe)
    quantized = getattr(te, "quantized_model_init", te.fp8_model_init)
    options = {"fuse_qkv_params": True} if kind == "TransformerLayer" else {}
    with quantized(enabled=True, recipe=recipe_):
        model = torch.nn.ModuleList([training.make_layer(te, kind, **options)])
    if how.prepare is not None:
        how.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    found: list[Any] = []
    for number in range(4):
        x = training.make_input(torch.float32, number)
        with te.autocast(True, recipe=recipe_):
            y = how.method(model[0], x * 1.0)
        y.square().mean().backward()
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        found.append({**training.scales(model), **training.process_state()})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["Linear", "TransformerLayer"])
@pytest.mark.parametrize("name", METHODS)
def test_training_is_bit_equal_to_plain_training(te: Any, name: str, kind: str, recipe: str) -> None:
    assert_equal(_train(te, kind, recipe, METHODS[name]), _train(te, kind, recipe, How()))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_step_between_forward_and_backward_raises(te: Any, recipe: str) -> None:
    recipe_ = training.make_recipe(recipe)
    with getattr(te, "quantized_model_init", te.fp8_model_init)(enabled=True, recipe=recipe_):
        layer = training.make_layer(te, "Linear")
    with te.autocast(True, recipe=recipe_):
        y = actckpt.checkpoint(layer, training.make_input(torch.float32, 1))
    with torch.no_grad():
        layer.weight.mul_(0.5)
    with pytest.raises(CheckpointError):
        y.sum().backward()
