"""Bytes alive are never more than with torch's checkpoint, and nothing is left behind: frames die with their graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from oracle import BOTH, Checkpoint, leaf, mlp, no_collector, ours, plain, theirs

import actckpt
from actckpt.memory import LiveStorages

Ask = Callable[[], None]


def _chain(checkpoint: Checkpoint, ask: Ask) -> None:
    model, x = mlp(width=32, depth=4), leaf(16, 32)
    for part in (model[:4], model[4:]):
        x = checkpoint(part, x)
        ask()
    x.sum().backward()


def _nested_checkpoints(checkpoint: Checkpoint, ask: Ask) -> None:
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


PROGRAMS = [_chain, _nested_checkpoints, _partial, _one_of_two, _dropped_result, _double, _keywords, _functions]


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


@pytest.fixture(name="no_collector")
def _no_collector() -> Iterator[None]:
    """Without the collector: what dies here dies by reference counts alone."""
    with no_collector():
        yield


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["backward", "dropped", "failed backward", "partial backward"])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_frame_dies_with_its_graph(end: str, as_module: bool) -> None:
    fails: list[int] = []

    class Function(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe = Cell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails:
                raise KeyError("rerun")
            return x.sin().exp()

    module, x = Function(), leaf(3)
    held = weakref.ref(module.probe)
    y = ours(module if as_module else (lambda x, module=module: module(x)), x * 2).sum()
    del module
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


class Cell:
    """What a step keeps a tensor in."""


def _attribute(x: torch.Tensor, c: Any) -> torch.Tensor:
    c.k = x.exp()
    return c.k.sin()


def _item(x: torch.Tensor, items: Any, key: Any = 0) -> torch.Tensor:
    items[key] = x.exp()
    return items[key].sin()


def _appended(x: torch.Tensor, items: list[Any]) -> torch.Tensor:
    items.append(x.exp())
    return items[-1].sin()


class KeepsItself(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _attribute(x, self)


def _rebinding() -> Callable[[torch.Tensor], torch.Tensor]:
    k: Any = None

    def region(x: torch.Tensor) -> torch.Tensor:
        nonlocal k
        k = x.exp()
        return k.sin()

    return region


def _nested(x: torch.Tensor, method: Any) -> Any:
    c = Cell()
    return method(lambda x: method(_attribute, x.sin(), c).cos(), x), c


def _hooked(x: torch.Tensor, method: Any) -> Any:
    c = Cell()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        return method(_attribute, x, c), c


def _with(make: Callable[[], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def step(x: torch.Tensor, method: Any) -> Any:
        keeper = make()
        return call(x, method, keeper), keeper

    return step


#: An object that keeps a tensor, and a region that replaces that tensor by its own result.
REPLACERS: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor, Any, Any], Any]]] = {
    "attribute of an argument": (Cell, lambda x, ck, c: ck(_attribute, x, c)),
    "keyword": (Cell, lambda x, ck, c: ck(_attribute, x, c=c)),
    "item of a list": (lambda: [None], lambda x, ck, items: ck(_item, x, items)),
    "dict": (dict, lambda x, ck, items: ck(_item, x, items, "k")),
    "closure": (Cell, lambda x, ck, c: ck(lambda x: _attribute(x, c), x)),
    "closure variable": (_rebinding, lambda x, ck, region: ck(region, x)),
    "partial": (Cell, lambda x, ck, c: ck(partial(_attribute, c=c), x)),
    "module": (KeepsItself, lambda x, ck, module: ck(module, x)),
}
#: Regions that keep a tensor which they make: what the forward made of it leads to the region itself.
KEEPERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    **{name: _with(make, call) for name, (make, call) in REPLACERS.items()},
    "list": _with(list, lambda x, ck, items: ck(_appended, x, items)),
    "object in a list": _with(lambda: [Cell()], lambda x, ck, cs: ck(lambda x, cs: _attribute(x, cs[0]), x, cs)),
    "default": _with(Cell, lambda x, ck, c: ck(lambda x, c=c: _attribute(x, c), x)),
    "module in a closure": _with(KeepsItself, lambda x, ck, module: ck(lambda x: module(x), x)),
    "nested": _nested,
    "inside hooks": _hooked,
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_tensor_that_stays_reachable_from_the_function_does_not_keep_the_region(
    keeper: str, is_offloaded: bool
) -> None:
    def step() -> list[weakref.ref[Any]]:
        x = leaf(64, 64) * 1.0
        storage = weakref.ref(x.untyped_storage())
        with actckpt.offload(min_bytes=0) if is_offloaded else nullcontext():
            y, kept = KEEPERS[keeper](x, ours)
        y.sum().backward()
        return [storage, weakref.ref(kept)] if not isinstance(kept, list | dict) else [storage]

    before = actckpt.stats().store_bytes
    for reference in step():
        assert reference() is None
    assert actckpt.stats().store_bytes <= before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keeper", REPLACERS)
def test_forwards_without_a_backward_that_replace_what_the_one_before_left_hold_one_of_them(keeper: str) -> None:
    # The region of each holds what it found, and that must not lead to the region before it.
    make, call = REPLACERS[keeper]
    kept, storages = make(), []
    for _ in range(5):
        x = leaf(3) * 1.0
        storages.append(weakref.ref(x.untyped_storage()))
        call(x, ours, kept)
    del x
    gc.collect()
    assert sum(storage() is not None for storage in storages) <= 2
