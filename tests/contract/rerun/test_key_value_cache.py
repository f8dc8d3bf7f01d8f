"""A key-value cache that the blocks of a decoder append to, written as Transformers' DynamicCache is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import METHODS
from oracle import Checkpoint, assert_equal, gradients, ours, plain

import actckpt


class Layer:
    """Keys and values of one block; made at its first update."""

    def __init__(self) -> None:
        self.is_initialized = False
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.seen = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = keys[:, :0], values[:, :0], True
        self.seen += keys.shape[1]
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        return self.keys, self.values


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= index:
            self.layers.append(Layer())
        return self.layers[index].update(keys, values)


class Block(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.project, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, cache: Cache | None = None) -> torch.Tensor:
        queries, keys, values = self.project(x).chunk(3, -1)
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        scores = torch.nn.functional.dropout((queries @ keys.mT).softmax(-1), 0.1, self.training)
        return x + self.out(scores @ values)


class Decoder(torch.nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(i) for i in range(3))
        self.call = call

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        for layer in self.layers:
            x = self.call(layer, x, cache)
        return x


#: How a block gets the cache: takes checkpoint, block, input, cache.
PASSED: dict[str, Callable[..., torch.Tensor]] = {
    "keyword": lambda ck, layer, x, cache: ck(layer, x, cache=cache),
    "positional": lambda ck, layer, x, cache: ck(lambda layer, x, cache: layer(x, cache=cache), layer, x, cache),
    "closure": lambda ck, layer, x, cache: ck(lambda x: layer(x, cache=cache), x),
}


def _plain(layer: Any, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
    return layer(x, cache=cache)


def _train(call: Callable[..., torch.Tensor], *, calls: int) -> list[Any]:
    """Some calls of a decoder through one cache, then two backwards."""
    torch.manual_seed(5)
    model, cache = Decoder(call), Cache()
    loss = sum(model(torch.randn(2, 4, 8), cache).square().mean() for _ in range(calls))
    loss.backward(retain_graph=True)
    loss.backward()
    left = [(layer.keys.detach(), layer.values.detach(), layer.seen) for layer in cache.layers]
    return [gradients(model), left]


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "without random state"])  # it has dropout
def test_blocks_that_append_to_a_cache_train_as_plain_ones_and_append_once(
    method: str, passed: str, calls: int
) -> None:
    call = partial(PASSED[passed], METHODS[method])
    assert_equal(_train(call, calls=calls), _train(_plain, calls=calls))


def test_the_cache_after_backward_is_the_one_that_the_forward_left() -> None:
    model, cache = Decoder(partial(PASSED["keyword"], ours)), Cache()
    loss = model(torch.randn(2, 4, 8), cache).square().mean()
    before = [(layer, layer.keys, layer.values) for layer in cache.layers]
    loss.backward()
    after = [(layer, layer.keys, layer.values) for layer in cache.layers]
    assert all(one is other for b, a in zip(before, after, strict=True) for one, other in zip(b, a, strict=True))


def test_gradients_reach_a_cache_that_was_filled_outside() -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        torch.manual_seed(0)
        block, cache = Block(0).eval(), Cache()
        prefix = torch.randn(2, 3, 8, requires_grad=True)
        cache.update(prefix * 2, prefix * 3, 0)
        checkpoint(block, torch.randn(2, 4, 8), cache=cache).sum().backward()
        return [prefix.grad, gradients(block)]

    assert_equal(run(ours), run(plain))


def test_steps_that_fill_a_new_cache_each_leave_nothing_behind() -> None:
    model = Decoder(partial(PASSED["keyword"], ours))

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            model(torch.randn(2, 4, 8), Cache()).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(10)
    assert objects_after(500) <= before + 20


def test_an_applied_model_whose_blocks_append_to_a_cache_trains_as_plain() -> None:
    def run(*, applies: bool) -> list[Any]:
        torch.manual_seed(0)
        model, cache = Decoder(_plain), Cache()
        if applies:
            assert actckpt.apply(model) == ("layers.0", "layers.1", "layers.2")
        for _ in range(2):
            model(torch.randn(2, 4, 8), cache).sum().backward(retain_graph=True)
        return [gradients(model), [layer.seen for layer in cache.layers]]

    assert_equal(run(applies=True), run(applies=False))
