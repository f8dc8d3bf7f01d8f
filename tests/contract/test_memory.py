"""Bytes alive: never more than with torch's checkpoint, at any instant that a program can ask for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BOTH, Checkpoint, leaf, mlp, ours, plain, theirs

from actckpt.memory import LiveStorages

Ask = Callable[[], None]


def _chain(checkpoint: Checkpoint, ask: Ask) -> None:
    model, x = mlp(width=32, depth=4), leaf(16, 32)
    for part in (model[:4], model[4:]):
        x = checkpoint(part, x)
        ask()
    x.sum().backward()


def _nested(checkpoint: Checkpoint, ask: Ask) -> None:
    models = [mlp(width=32, depth=2) for _ in range(3)]

    def outer(x: torch.Tensor) -> torch.Tensor:
        for model in models:
            x = checkpoint(model, x.sin())
        return x.exp()

    y = checkpoint(outer, leaf(16, 32))
    ask()
    y.sum().backward(retain_graph=True)
    ask()
    y.sum().backward()


def _partial(checkpoint: Checkpoint, ask: Ask) -> None:
    x, w = leaf(64), leaf(64)
    y = checkpoint(lambda x, w: (x.exp().sin().exp() * w.exp().sin().exp()).exp(), x, w).sum()
    ask()
    torch.autograd.grad(y, w, retain_graph=True)
    ask()
    torch.autograd.grad(y, x, retain_graph=True)
    ask()
    y.backward()


def _one_of_two(checkpoint: Checkpoint, ask: Ask) -> None:
    x = leaf(64)
    a, b = checkpoint(lambda x: (x.exp().sin().exp(), x.sin().exp().sin()), x)
    ask()
    a.sum().backward()
    ask()
    b.sum().backward()


def _dropped_result(checkpoint: Checkpoint, ask: Ask) -> None:
    x = leaf(64)
    a, b = checkpoint(lambda x: (x.exp().sin().exp(), x.sin().exp().sin()), x)
    del b
    ask()
    a.sum().backward()


def _double(checkpoint: Checkpoint, ask: Ask) -> None:
    x = leaf(64)
    y = checkpoint(lambda x: x.exp().sin().exp().sin(), x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    ask()
    grad.square().sum().backward()


def _keywords(checkpoint: Checkpoint, ask: Ask) -> None:
    x, m = leaf(64), leaf(64)
    y = checkpoint(lambda x, *, m, ms: (x * m).exp() * ms[0], x.sin(), m=m.sin(), ms=[m.cos()])
    ask()
    y.sum().backward()


def _functions(checkpoint: Checkpoint, ask: Ask) -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.exp(), x.sin())
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            _, exp, _ = ctx.saved_tensors
            return grad * exp

    y = checkpoint(lambda x: Save.apply(Save.apply(x.sin()).sin()), leaf(64))
    ask()
    y.sum().backward()


PROGRAMS = [_chain, _nested, _partial, _one_of_two, _dropped_result, _double, _keywords, _functions]


def _bytes(program: Callable[[Checkpoint, Ask], None], method: Checkpoint) -> tuple[int, list[int], int]:
    torch.manual_seed(1)
    gc.collect()
    live_bytes: list[int] = []
    with LiveStorages() as live:
        program(method, lambda: live_bytes.append(live.live_bytes))
        gc.collect()
    return live.peak_bytes, live_bytes, live.live_bytes


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_more_bytes_live_than_with_torch(program: Callable[[Checkpoint, Ask], None]) -> None:
    peak, asked, left = _bytes(program, ours)
    torch_peak, torch_asked, torch_left = _bytes(program, theirs)
    assert peak <= torch_peak
    assert [(own, other) for own, other in zip(asked, torch_asked, strict=True) if own > other] == []
    assert left <= torch_left


def test_values_that_an_unpack_outside_of_backward_brought_back_are_freed_at_once() -> None:
    x = leaf(64)
    with LiveStorages() as live:
        y = ours(lambda x: x.exp().sin().exp(), x)
        before = live.live_bytes
        assert y.grad_fn._saved_result is not None
        assert live.live_bytes == before


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_an_outer_region_frees_the_positional_inputs_of_an_inner_one(method: Checkpoint) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        middle = x.sin()
        seen.append(weakref.ref(middle.untyped_storage()))
        return method(lambda x: x.exp(), middle).sum()

    y = method(outer, leaf(8))
    assert seen[0]() is None
    y.backward()


def test_the_graph_releases_inputs_as_soon_as_plain_autograd_does() -> None:
    alive = {}
    for name, method in {"plain": plain, **BOTH}.items():
        x = leaf(64)
        middle = x * 2
        storage = weakref.ref(middle.untyped_storage())
        y = method(lambda x: x.sin().exp(), middle)
        del middle
        during: list[bool] = []
        x.register_hook(lambda _, storage=storage, during=during: during.append(storage() is not None))
        y.sum().backward()
        alive[name] = during
    assert alive["actckpt"] == alive["torch"]
