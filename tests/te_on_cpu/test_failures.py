"""What raises in a forward or a rerun leaves nothing behind, and training goes on as if that part had not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import actckpt
from te_on_cpu import training
from te_on_cpu.methods import METHODS
from te_on_cpu.training import RECIPES

#: Where it raises: after a part of the layer, after all of it, or inside of a module, in a kernel.
_PLACES = ("self_attention", "layernorm_mlp", "end", "kernel")


class _Trap:
    """Raises at one place of a layer while it is set."""

    def __init__(self, layer: torch.nn.Module, place: str) -> None:
        self.is_set = False
        self._kernels = sys.modules["transformer_engine_torch"]
        self._multiply, self._is_kernel = self._kernels.generic_gemm, place == "kernel"
        if not self._is_kernel:
            module = layer if place == "end" else getattr(layer, place)
            module.register_forward_hook(lambda *_: self._spring())

    def __enter__(self) -> _Trap:
        if self._is_kernel:
            self._kernels.generic_gemm = self._trapped_multiply  # type: ignore[attr-defined]
        return self

    def __exit__(self, *details: Any) -> None:
        self._kernels.generic_gemm = self._multiply  # type: ignore[attr-defined]

    def _trapped_multiply(self, *args: Any, **kwargs: Any) -> Any:
        self._spring()
        return self._multiply(*args, **kwargs)

    def _spring(self) -> None:
        if self.is_set:
            raise ValueError("trapped")


def _train(te: Any, recipe: str, place: str, call: Any, step: Callable[[_Trap, Any, Callable[[int], Any]], Any]) -> Any:
    """Train one layer for three steps, of which `step` is called for the second; return what is left of it."""
    training.reset()
    torch.manual_seed(3)
    layer, recipe_ = training.make_layer(te, "TransformerLayer"), training.make_recipe(recipe)
    found: dict[str, Any] = {}

    def forward(number: int) -> Tensor:
        with te.autocast(recipe_ is not None, recipe=recipe_):
            result: Tensor = call(layer, training.make_input(torch.float32, number))
        return result

    for number in range(3):
        if number == 1:
            with _Trap(layer, place) as trap:
                step(trap, layer, forward)
        else:
            y = forward(number)
            y.square().mean().backward()
            found |= {f"output {number}": y.detach()}
        found |= {f"gradient of {name} {number}": p.grad for name, p in layer.named_parameters()}
        state = {**training.scales(layer), **training.process_state()}
        found |= {f"{name} {number}": value for name, value in state.items()}
        layer.zero_grad()
    return found


def _to_the_end(layer: Any, x: Tensor) -> Any:
    return actckpt.checkpoint(layer, x, early_stop=False)


def _wrapped(layer: Any, x: Tensor) -> Any:
    if "forward" not in vars(layer):
        actckpt.te.wrap(layer, retain_graph=True)
    return layer(x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("method", [_to_the_end, _wrapped])
def test_a_rerun_that_raises_leaves_the_forwards_state(te: Any, method: Any, place: str, recipe: str) -> None:
    """As a run in which the backward whose rerun raises is left out."""
    if method is _wrapped and place == "end":
        pytest.skip("the layer's own hooks run outside of a wrapped forward")

    def trapped(trap: _Trap, layer: Any, forward: Any) -> None:
        y = forward(1)
        trap.is_set = True
        with pytest.raises(ValueError, match="trapped"):
            y.square().mean().backward()
        trap.is_set = False

    expected = _train(te, recipe, place, training.plain, lambda trap, layer, forward: forward(1))
    assert training.differing(_train(te, recipe, place, method, trapped), expected) == []


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("name", ["checkpoint", "nested", "offload", "region"])
def test_a_forward_that_raises_leaves_what_it_leaves_without_us(te: Any, name: str, place: str, recipe: str) -> None:
    def trapped(trap: _Trap, layer: Any, forward: Any) -> None:
        trap.is_set = True
        with pytest.raises(ValueError, match="trapped"):
            forward(1)
        trap.is_set = False

    expected = _train(te, recipe, place, training.plain, trapped)
    assert training.differing(_train(te, recipe, place, METHODS[name].method, trapped), expected) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_after_one_that_raised_gives_the_gradients(te: Any, recipe: str) -> None:
    def plainly(trap: _Trap, layer: Any, forward: Any) -> None:
        forward(1).square().mean().backward()

    def twice(trap: _Trap, layer: Any, forward: Any) -> None:
        loss = forward(1).square().mean()
        trap.is_set = True
        with pytest.raises(ValueError, match="trapped"):
            loss.backward(retain_graph=True)
        trap.is_set = False
        loss.backward()

    expected = _train(te, recipe, "layernorm_mlp", training.plain, plainly)
    assert training.differing(_train(te, recipe, "layernorm_mlp", actckpt.checkpoint, twice), expected) == []
