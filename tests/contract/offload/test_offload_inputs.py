"""`offload_inputs=True` where operators are replayed: what the region holds of its inputs goes to the store."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from internals.stores import flush, offload_from
from oracle import assert_equal, leaf
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import actckpt
from actckpt.errors import SavedTensorChangedError

pytestmark = pytest.mark.usefixtures("kind")

_SIZE = 32
_BYTES = _SIZE * _SIZE * 4
_POLICIES: dict[str, Any] = {
    "nothing kept": [],
    "products kept": ["aten.mm"],
    "sines offloaded": {"**::aten.sin": "offload"},
    "preset": "matmuls",
    "a function": lambda info: "recompute",
}


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move inputs of every size."""
    offload_from(monkeypatch, 0)


def _saved_by_autograd(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (h @ w).sin().exp()


def _read_by_replay_alone(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (h + 1.0).sin().sin() + w.sum()


_FUNCTIONS = (_saved_by_autograd, _read_by_replay_alone)


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_gradients_are_bit_equal_and_the_input_is_released(function: Callable[..., torch.Tensor], policy: str) -> None:
    x, w = leaf(_SIZE, _SIZE), torch.nn.Parameter(torch.randn(_SIZE, _SIZE))
    expected = torch.autograd.grad(function(x * 1.5, w).sum(), (x, w))
    for _ in range(2):  # the first one is audited
        h = x * 1.5
        storage = weakref.ref(h.untyped_storage())
        y = actckpt.checkpoint(function, h, w, policy=_POLICIES[policy], offload_inputs=True).sum()
        del h
        flush()
        gc.collect()
        assert storage() is None
        assert actckpt.stats().store_bytes >= _BYTES
        assert_equal(torch.autograd.grad(y, (x, w), retain_graph=True), expected)
        assert_equal(torch.autograd.grad(y, (x, w)), expected)
        del y


def test_parameters_buffers_and_small_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_from(monkeypatch, _BYTES)
    module = torch.nn.BatchNorm1d(_SIZE)
    module.register_buffer("big", torch.randn(_SIZE, _SIZE))
    weight, small = torch.nn.Parameter(torch.randn(_SIZE, _SIZE)), torch.randn(_SIZE)
    module.forward = lambda h: ((h @ weight) * module.big * small).sin()
    x = leaf(_SIZE, _SIZE)
    expected = torch.autograd.grad(module.forward(x * 1.5).sum(), (x, weight))
    for is_audited in (True, False):
        actckpt.reset_stats()
        y = actckpt.checkpoint(module, x * 1.5, policy=[], offload_inputs=True).sum()
        assert is_audited or actckpt.stats().offloaded_bytes == _BYTES
        assert_equal(torch.autograd.grad(y, (x, weight)), expected)


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_an_input_that_changes_afterwards_never_gives_another_gradient(function: Callable[..., torch.Tensor]) -> None:
    x, w = leaf(_SIZE, _SIZE), torch.nn.Parameter(torch.randn(_SIZE, _SIZE))
    expected = torch.autograd.grad(function(x * 1.5, w).sum(), (x, w))
    for _ in range(2):
        h = x * 1.5
        y = actckpt.checkpoint(function, h, w, policy=[], offload_inputs=True).sum()
        flush()
        h.detach().zero_()
        try:
            found = torch.autograd.grad(y, (x, w))
        except SavedTensorChangedError:
            continue
        assert function is _read_by_replay_alone, "plain autograd notices the change"
        assert_equal(found, expected)


def test_a_function_is_asked_for_all_but_the_inputs_that_are_moved() -> None:
    asked: list[actckpt.SavedTensorInfo] = []

    def policy(info: actckpt.SavedTensorInfo) -> actckpt.Action:
        asked.append(info)
        return actckpt.Action.KEEP

    x, w = leaf(_SIZE, _SIZE), torch.nn.Parameter(torch.randn(_SIZE, _SIZE))
    expected = torch.autograd.grad(_saved_by_autograd(x * 1.5, w).sum(), (x, w))
    y = actckpt.checkpoint(_saved_by_autograd, x * 1.5, w, policy=policy, offload_inputs=True).sum()
    assert actckpt.stats().offloaded_bytes == _BYTES
    assert not any(info.is_input and not info.is_parameter for info in asked) and len(asked) >= 2
    assert_equal(torch.autograd.grad(y, (x, w)), expected)


_ON_ONE_STORAGE: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "transposed": lambda h: (h, h.t()),
    "detached": lambda h: (h, h.detach().t()),
    "halves": lambda h: tuple(torch.stack([h, h.cos()]).unbind()),
    "expanded": lambda h: (h, h[0].expand(_SIZE, _SIZE)),
    "halves transposed": lambda h: tuple(part.t() for part in torch.stack([h, h.cos()]).unbind()),
}
_OF_BOTH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one first": lambda h, o: (h.sin() * o).exp().sin(),
    "other first": lambda h, o: (o.sin() * h).exp().sin(),
    "read by replay": lambda h, o: ((o + 1.0).sin() * (h + 1.0).cos()).sin(),
    "in turns": lambda h, o: (o + 1.0).cos() * h.sin() * o.cos(),
}


#: Hooks around the rerun: they give all inputs of one storage one memory, or each its own.
_OUTSIDE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "offload_inputs": contextlib.nullcontext,
    "offload": lambda: actckpt.offload(min_bytes=0),
    "aliases": lambda: saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor),
    "clones": lambda: saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor),
    "rounded": lambda: saved_tensors_hooks(lambda tensor: tensor.contiguous().double(), lambda tensor: tensor.float()),
    "save_on_cpu": save_on_cpu,
}


@pytest.mark.parametrize("policy", ["recompute", [], lambda info: "keep"])
@pytest.mark.parametrize("outside", ["clones", "save_on_cpu", "region"])
def test_what_hooks_outside_hold_is_theirs_to_move(outside: str, policy: Any) -> None:
    hooks = {**_OUTSIDE, "region": lambda: actckpt.region([])}
    x, w = leaf(_SIZE, _SIZE), torch.nn.Parameter(torch.randn(_SIZE, _SIZE))
    expected = torch.autograd.grad(_saved_by_autograd(x * 1.5, w).sum(), (x, w))
    for is_audited in (True, False):
        actckpt.reset_stats()
        with hooks[outside]():
            y = actckpt.checkpoint(_saved_by_autograd, x * 1.5, w, policy=policy, offload_inputs=True).sum()
        assert is_audited or actckpt.stats().offloaded_bytes == 0
        assert_equal(torch.autograd.grad(y, (x, w)), expected)


@pytest.mark.parametrize("outside", _OUTSIDE)
@pytest.mark.parametrize("function", _OF_BOTH)
@pytest.mark.parametrize("inputs", _ON_ONE_STORAGE)
def test_a_region_in_a_rerun_finds_each_of_several_inputs_on_one_storage(
    inputs: str, function: str, outside: str
) -> None:
    def region(h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        with actckpt.region("recompute"):
            return _OF_BOTH[function](h, o)

    x = leaf(_SIZE, _SIZE)
    expected = torch.autograd.grad(_OF_BOTH[function](*_ON_ONE_STORAGE[inputs](x * 1.5)).sum(), x)
    for early_stop in (True, False):
        with _OUTSIDE[outside]():
            both = _ON_ONE_STORAGE[inputs](x * 1.5)
            options = {"offload_inputs": outside == "offload_inputs", "early_stop": early_stop}
            y = actckpt.checkpoint(region, *both, **options).sum()
        assert_equal(torch.autograd.grad(y, x), expected)
