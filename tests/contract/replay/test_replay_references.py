"""500 replays of each kind give every reference back: internals/references.py tells how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import on_device
import pytest
import torch
from internals.references import assert_references_flat, chain, fails, sines
from oracle import SavingSquare, leaf, ours

import actckpt


@pytest.fixture(autouse=True)
def _outside_of_any_region() -> None:
    _normed(), _buffer(), _weight()


def _once(y: torch.Tensor, x: torch.Tensor) -> None:
    y.backward()


def _by_value(info: Any) -> actckpt.Action:
    return actckpt.Action.KEEP if info.index else actckpt.Action.RECOMPUTE


POLICIES: dict[str, Any] = {
    "keep": "keep",
    "recompute": "recompute",
    "offload": "offload",
    "prefer_offload": "prefer_offload",
    "list": ["aten.exp"],
    "per op": actckpt.policies.PerOp({"aten.sin": "keep", "aten.exp": "offload"}, default="recompute"),
    "by value": _by_value,
}


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0] = y[1] * 2
    return y.mul_(2).add_(x).exp_()


def _filled(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2, 4)
    buffer[0] = x[0].sin()
    buffer[1] = x[1].cos()
    return buffer.exp() * torch.rand(4)


@functools.cache
def _normed() -> torch.nn.Module:
    return torch.nn.BatchNorm1d(4)


@functools.cache
def _buffer() -> torch.Tensor:
    return torch.ones(4)


def _buffers(x: torch.Tensor) -> torch.Tensor:
    _buffer().mul_(0.5).add_(1)
    return _normed()(x.sin()).exp() * _buffer()


@functools.cache
def _weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(4, 4))


def _casts(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(on_device.device_type, torch.bfloat16):
        return (x @ _weight()).tanh() @ _weight()


def _function(x: torch.Tensor) -> torch.Tensor:
    return SquareAndBack.apply(x.sin()) * x


class SquareAndBack(SavingSquare):
    """Saves its argument."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _nested(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    with actckpt.region(["aten.tanh"]):
        y = y.exp().tanh().cos()
    return ours(sines, y).cos()


def _many(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().tanh().cos().sigmoid().exp().sin().sum() + x.sort(0)[0].exp().var(1).sum()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": _in_place,
    "filled": _filled,
    "buffers": _buffers,
    "casts": _casts,
    "function": _function,
    "nested": _nested,
    "many": _many,
    "failing forward": fails,
}


def _by_retained(y: torch.Tensor, x: torch.Tensor) -> None:
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()


def _by_double(y: torch.Tensor, x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()


def _by_failing(y: torch.Tensor, x: torch.Tensor) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise KeyError(grad)

    handle = x.register_hook(fail)
    try:
        y.backward()
    finally:
        handle.remove()


#: A program, the policy of its region, settings, and how its backward runs.
STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, dict[str, Any], Callable[..., Any]]] = {
    **{f"policy {name}": (chain, policy, {}, _once) for name, policy in POLICIES.items()},
    **{name: (program, "recompute", {}, _once) for name, program in PROGRAMS.items()},
    "audit always": (_many, "recompute", {"audit": "always"}, _once),
    "audit off": (_many, "recompute", {"audit": "off"}, _once),
    "opaque": (_many, "recompute", {"opaque": ["aten.exp", "aten.mul"]}, _once),
    "retained": (_many, "recompute", {}, _by_retained),
    "double": (_many, "recompute", {}, _by_double),
    "failing backward": (_many, "recompute", {}, _by_failing),
    "no backward": (_many, "recompute", {}, lambda y, x: None),
}


@pytest.mark.parametrize("name", STEPS)
def test_replays_give_every_reference_back(name: str) -> None:
    program, policy, changes, backward = STEPS[name]
    actckpt.configure(**changes)
    x = leaf(2, 4)

    def step() -> None:
        with suppress(KeyError):
            with actckpt.region(policy):
                y = program(x)
            backward(y.float().sum(), x)

    assert_references_flat(step)
