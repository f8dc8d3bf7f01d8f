"""Offloading over many steps: bytes, objects and resident memory stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from flat import STEPS, assert_flat
from internals.stores import flush, store_of_kind
from oracle import leaf, mlp, ours

import actckpt
from actckpt.action import Action

Step = Callable[[], None]

_KIB = 1 << 10


def _backward(y: torch.Tensor, *leaves: torch.Tensor) -> None:
    torch.autograd.grad(y.sum(), leaves)


def _small_values_of_a_policy() -> Step:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    x = torch.randn(256, 16)
    policy = actckpt.policies.PerOp({torch.ops.aten.tanh.default: Action.OFFLOAD}, default=Action.RECOMPUTE)

    def step() -> None:
        with actckpt.region(policy):
            y = model(x)
        _backward(y, *model.parameters())

    return step


def _around(context: Callable[[], Any], numel: int, *, is_flushed: bool = False) -> Step:
    x = leaf(numel)

    def step() -> None:
        with context():
            y = (x * 2).sin().tanh()
        if is_flushed:
            flush()
        _backward(y, x)

    return step


def _offload() -> Any:
    return actckpt.offload(min_bytes=0)


def _of_a_dropped_graph() -> Step:
    x = leaf(4 * _KIB)

    def step() -> None:
        with _offload():
            y = (x * 2).sin().tanh()
        del y

    return step


def _of_a_partial_backward() -> Step:
    x = leaf(4 * _KIB)

    def step() -> None:
        with _offload():
            first = (x * 2).sin()
            second = first.tanh()
        flush()
        torch.autograd.grad(second.sum(), first, retain_graph=True)
        torch.autograd.grad(first.sum(), x)

    return step


def _of_a_failing_backward() -> Step:
    x = leaf(4 * _KIB)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    def step() -> None:
        with _offload():
            first = (x * 2).sin()
            first.register_hook(fail)
            second = first.tanh()
        flush()
        with suppress(KeyError):
            _backward(second, x)

    return step


def _of_offloaded_inputs() -> Step:
    model, x = mlp(16), leaf(64, 16)

    def step() -> None:
        _backward(ours(model, ours(model, x * 2, offload_inputs=True), offload_inputs=True), x)

    return step


KINDS: dict[str, tuple[Callable[[], Step], int]] = {
    "small values of a policy": (_small_values_of_a_policy, 2),
    "small values of a policy, no workers": (_small_values_of_a_policy, 0),
    "two tensors, no workers": (lambda: _around(_offload, 64 * _KIB), 0),
    "two tensors that were written, no workers": (lambda: _around(_offload, 4 * _KIB, is_flushed=True), 0),
    "what prefers to be offloaded": (lambda: _around(lambda: actckpt.region("prefer_offload"), 4 * _KIB), 2),
    "a dropped graph": (_of_a_dropped_graph, 0),
    "a partial backward": (_of_a_partial_backward, 0),
    "a failing backward": (_of_a_failing_backward, 0),
    "offloaded inputs": (_of_offloaded_inputs, 2),
}


@pytest.mark.usefixtures("small_tensors")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", KINDS)
def test_offloading_stays_flat_over_many_steps(name: str, steps: int) -> None:
    make_step, num_workers = KINDS[name]
    with store_of_kind("disk", num_workers=num_workers):
        assert_flat(make_step(), steps)
