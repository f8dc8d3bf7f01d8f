"""A key-value cache that the blocks of a decoder append to, written as Transformers' DynamicCache is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import METHODS
from oracle import assert_equal, gradients, ours

import actckpt
from actckpt.errors import RerunMismatchError


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


@pytest.mark.parametrize("audit", ["off", "always"])
@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "without random state"])  # it has dropout
def test_blocks_that_append_to_a_cache_raise(method: str, passed: str, audit: Any) -> None:
    actckpt.configure(audit=audit)  # until the fixture of all tests puts it back
    with pytest.raises(RerunMismatchError, match="saved a tensor that is different from its forward's"):
        _train(partial(PASSED[passed], METHODS[method]), calls=1)


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("passed", PASSED)
def test_under_a_policy_they_train_as_plain_ones_and_append_once(passed: str, calls: int) -> None:
    call = partial(PASSED[passed], partial(ours, policy=[]))
    assert_equal(_train(call, calls=calls), _train(_plain, calls=calls))
