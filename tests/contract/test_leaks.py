"""Nothing is left behind: objects and bytes stay flat over many steps, frames die with their graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from oracle import leaf, mlp, ours

import actckpt
from actckpt.memory import LiveStorages

STEPS = 2000


def _common(model: torch.nn.Module, x: torch.Tensor) -> None:
    ours(model, x).sum().backward()


def _uncommon(model: torch.nn.Module, x: torch.Tensor) -> None:
    scale = x * 2
    y = ours(lambda x, *, k: ours(model, x * scale) * k["k"], x, k={"k": scale.sin()}, context_fn=_two_contexts)
    y.sum().backward()


def _two_contexts() -> Any:
    return nullcontext(), nullcontext()


def _partial(model: torch.nn.Module, x: torch.Tensor) -> None:
    y = ours(lambda x: (model(x).exp(), x.sin().exp()), x)
    torch.autograd.grad(y[0].sum(), x, retain_graph=True)


def _abandoned(model: torch.nn.Module, x: torch.Tensor) -> None:
    ours(model, x)
    ours(lambda x: model(x), x.sin())


def _failing(model: torch.nn.Module, x: torch.Tensor) -> None:
    runs: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[1:].sin().exp()

    y = ours(function, x)
    try:
        y.sum().backward()
    except RuntimeError:
        return
    raise AssertionError("it should have failed")


STEP_KINDS: dict[str, tuple[Callable[..., None], int]] = {
    "common": (_common, STEPS),
    "uncommon": (_uncommon, STEPS // 4),
    "partial": (_partial, STEPS // 4),
    "abandoned": (_abandoned, STEPS // 4),
    "failing": (_failing, STEPS // 8),
}


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_objects_and_bytes_stay_flat_over_many_steps(kind: str) -> None:
    step, count = STEP_KINDS[kind]
    model, x = mlp(dropout=0.1), leaf(2, 8)

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            step(model, x)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(10)
    after = objects_after(count)
    assert after <= before + 20
    gc.collect()
    with LiveStorages(parameters=[x, *model.parameters()]) as live:
        for _ in range(20):
            step(model, x)
        gc.collect()
        assert live.live_bytes == 0


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the collector: what dies here dies by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe:
    """An argument whose life is that of the frame that holds it."""


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["backward", "dropped", "failed backward", "partial backward"])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_frame_dies_with_its_graph(end: str, as_module: bool) -> None:
    probe = Probe()
    held = weakref.ref(probe)
    fails: list[int] = []

    class Function(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe = held()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails:
                raise KeyError("rerun")
            return x.sin().exp()

    module = Function()
    x = leaf(3)
    y = ours(module if as_module else (lambda x, module=module: module(x)), x * 2).sum()
    del probe, module
    assert held() is not None
    if end == "backward":
        y.backward()
        assert held() is None, "freed by backward, though the result lives"
    elif end == "failed backward":
        fails.append(1)
        with suppress(KeyError):
            y.backward()
    elif end == "partial backward":
        torch.autograd.grad(y, x, retain_graph=True)
    del y
    assert held() is None


@pytest.mark.usefixtures("no_collector")
def test_values_live_until_the_end_of_a_retained_backward_only() -> None:
    storages: list[weakref.ref[Any]] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x.exp(), w.exp()
        storages[:] = [weakref.ref(a.untyped_storage()), weakref.ref(b.untyped_storage())]
        return (a * b).sin()

    x, w = leaf(3), leaf(3)
    y = ours(function, x, w).sum()
    assert [s() for s in storages] == [None, None]
    torch.autograd.grad(y, w, retain_graph=True)
    assert [s() for s in storages] == [None, None]
    y.backward(retain_graph=True)
    assert [s() for s in storages] == [None, None]


@pytest.mark.usefixtures("no_collector")
def test_values_of_a_backward_that_fails_elsewhere_are_freed() -> None:
    storages: list[weakref.ref[Any]] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("in backward")

    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        storages[:] = [weakref.ref(a.untyped_storage())]
        return Fails.apply(a * 1).sin()

    y = ours(function, leaf(3)).sum()
    with suppress(KeyError):
        y.backward(retain_graph=True)
    assert storages[0]() is None


class _ViewThatSavesItself(torch.autograd.Function):
    """Returns a view of its input and saves it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.t()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return (grad * y).t()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload", "prefer_offload"])
def test_a_node_that_saves_the_view_of_a_parameter_that_it_made_is_freed(policy: str) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    with actckpt.region(policy):
        y = _ViewThatSavesItself.apply(weight)
    node = weakref.ref(y.grad_fn)
    (grad,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
    assert torch.equal(grad, weight)
    del y
    assert node() is None
