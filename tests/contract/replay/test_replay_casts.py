"""Casts of parameters that autocast caches: replayed from the parameter in every region that uses them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import CountOperators, assert_equal, leaf
from torch import Tensor

import actckpt
from actckpt.memory import LiveStorages

_SIZE = 64
_CAST_BYTES = _SIZE * _SIZE * 2


pytestmark = pytest.mark.usefixtures("no_audit")


def _loss(layer: torch.nn.Linear, x: Tensor, policy: Any, num_regions: int) -> Tensor:
    h = x
    with torch.autocast(x.device.type, torch.bfloat16):
        for _ in range(num_regions):
            with nullcontext() if policy is None else actckpt.region(policy):
                h = torch.tanh(layer(h))
    return h.float().sum()


def _layer_and_input() -> tuple[torch.nn.Linear, Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(_SIZE, _SIZE, bias=False), leaf(2, _SIZE)


@pytest.mark.parametrize("policy", ["recompute", ["aten.mm"], ["aten._to_copy"], lambda info: actckpt.Action.RECOMPUTE])
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_gradients_are_those_of_plain_autograd(policy: Any, num_backwards: int) -> None:
    found = []
    for chosen in (None, policy):
        layer, x = _layer_and_input()
        loss = _loss(layer, x, chosen, 3)
        for left in range(num_backwards - 1, -1, -1):
            loss.backward(retain_graph=left > 0)
        found.append((layer.weight.grad, x.grad))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("num_regions", [2, 4])
def test_no_region_holds_the_cast_of_another(num_regions: int) -> None:
    layer, x = _layer_and_input()
    _loss(layer, x, "recompute", num_regions).backward()
    with LiveStorages() as live:
        loss = _loss(layer, x, "recompute", num_regions)
        assert live.live_bytes < _CAST_BYTES
        with CountOperators() as counted:
            loss.backward()
    # Once per region for the weight, and those of backward itself.
    plainly = CountOperators()
    loss = _loss(layer, x, None, num_regions)
    with plainly:
        loss.backward()
    added = counted.counts["aten._to_copy.default"] - plainly.counts["aten._to_copy.default"]
    assert num_regions <= added <= num_regions + 1  # and that of the input


def test_a_policy_that_keeps_casts_keeps_them() -> None:
    layer, x = _layer_and_input()
    with LiveStorages() as live:
        loss = _loss(layer, x, ["aten._to_copy"], 2)
        assert live.live_bytes >= _CAST_BYTES
    loss.backward()


def test_a_parameter_that_changed_before_backward_raises() -> None:
    layer, x = _layer_and_input()
    loss = _loss(layer, x, "recompute", 2)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        loss.backward()


def test_a_cast_from_before_a_change_of_its_parameter_is_kept() -> None:
    def run(policy: Any) -> Tensor:
        layer, x = _layer_and_input()
        region = nullcontext if policy is None else (lambda: actckpt.region(policy))
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad(), torch.enable_grad(), region():
                layer(x)
            with torch.no_grad():
                layer.weight.mul_(2)
            with region():
                h = layer(x)  # uses the cast in the cache
        return torch.autograd.grad(h.float().sum(), x)[0]

    assert torch.equal(run("recompute"), run(None))


def test_replays_leave_casts_in_the_cache_of_an_autocast_around_backward() -> None:
    """A thread of autograd runs them on a device. The next forward needs the same casts."""
    layer, x = _layer_and_input()
    with torch.autocast(x.device.type, torch.bfloat16), LiveStorages() as live:
        with actckpt.region():
            loss = torch.tanh(layer(x)).float().sum()
        loss.backward()
        del loss
        x.grad = layer.weight.grad = None
        assert live.live_bytes >= _CAST_BYTES
