"""500 steps of each kind give every reference back: internals/references.py tells how."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from internals.references import STEPS, SavesBoth, assert_references_flat, chain, fails, sines
from internals.stores import faults, faulty_store, flush, store_of_kind
from offload_oracle import two_tensor
from oracle import SavingSquare, leaf, ours
from torch import Tensor

import actckpt

Step = Callable[[Tensor], object]
Program = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _outside_of_any_region() -> None:
    _normed(), _buffer(), _weight()


@functools.cache
def _normed() -> torch.nn.Module:
    return torch.nn.BatchNorm1d(4)


@functools.cache
def _buffer() -> Tensor:
    return torch.ones(4)


@functools.cache
def _weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(4, 4))


_generator = torch.Generator()


# How backward runs.


def _once(y: Tensor, x: Tensor) -> None:
    y.backward()


def _retained(y: Tensor, x: Tensor) -> None:
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
    y.backward()


def _double(y: Tensor, x: Tensor) -> None:
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()


def _failing(y: Tensor, x: Tensor) -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError(grad)

    handle = x.register_hook(fail)
    try:
        y.backward()
    finally:
        handle.remove()


def _none(y: Tensor, x: Tensor) -> None:
    pass


# Reruns.


def _rerun(program: Program, backward: Callable[..., None] = _once, **options: Any) -> Step:
    return lambda x: backward(ours(program, x, **options).sum(), x)


def _keywords_and_containers(x: Tensor) -> None:
    def function(x: Tensor, items: list[Any], *, named: dict[str, Any]) -> Any:
        items.append(x.exp())
        named["made"] = items[-1].sin()
        return {"y": (named["made"] * items[0], [x.cos()])}

    y = ours(function, x, [x * 2], named={"a": x.sin(), "b": (x, {"c": x})})["y"]
    (y[0] + y[1][0]).sum().backward()


def _settings_of_torch(x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        y = ours(lambda x: (x @ x.T).sin(), x, debug=True, early_stop=False)
    y.sum().backward()


def _differs(second: Program) -> Step:
    """Return a step whose rerun runs something else than its forward."""

    def step(x: Tensor) -> None:
        ways = iter((sines, second))
        with suppress(actckpt.CheckpointError):
            ours(lambda x: next(ways)(x), x).sum().backward()

    return step


def _changed_input(x: Tensor) -> None:
    a = x * 2
    y = ours(sines, a)
    with torch.no_grad():
        a.mul_(2)
    with suppress(actckpt.CheckpointError):
        y.sum().backward()


def _closure_and_module(x: Tensor) -> None:
    scale, layer = x.cos(), torch.nn.Linear(4, 4)
    ours(lambda x: layer(x * scale).sin(), x).sum().backward()


def _contexts() -> tuple[Any, Any]:
    return torch.autocast("cpu", torch.bfloat16), torch.enable_grad()


def _offloaded_inputs(x: Tensor) -> None:
    y = ours(sines, x * 2, offload_inputs=True)
    ours(sines, y, offload_inputs=True).sum().backward()


RERUNS: dict[str, Step] = {
    "common": _rerun(sines),
    "keywords and containers": _keywords_and_containers,
    "closure and module": _closure_and_module,
    "buffers": lambda x: ours(_normed(), x).sum().backward(),
    "generators": _rerun(lambda x: (x * torch.rand(2, 4, generator=_generator)).sin() * torch.rand(4)),
    "contexts": _rerun(sines, context_fn=_contexts),
    "settings of torch": _settings_of_torch,
    "failing forward": _rerun(fails),
    "failing rerun": _differs(fails),
    "another rerun": _differs(lambda x: x[1:].sin().exp()),
    "changed input": _changed_input,
    "failing backward": _rerun(sines, _failing),
    "retained": _rerun(sines, _retained),
    "double": _rerun(sines, _double),
    "part of a graph": lambda x: torch.autograd.grad(ours(lambda x: (x.sin().exp(), x.cos().exp()), x)[0].sum(), x),
    "no backward": _rerun(sines, _none),
    "nested": _rerun(lambda x: ours(sines, x.cos()).tanh()),
    "subclass": lambda x: ours(SavesBoth.apply, x, two_tensor(2, 4)).sum().backward(),
    "offloaded inputs": _offloaded_inputs,
}


# Replays.


def _replay(program: Program, policy: Any = "recompute", backward: Callable[..., None] = _once) -> Step:
    def step(x: Tensor) -> None:
        with actckpt.region(policy):
            y = program(x)
        backward(y.float().sum(), x)

    return step


def _in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y[0] = y[1] * 2
    return y.mul_(2).add_(x).exp_()


def _filled(x: Tensor) -> Tensor:
    buffer = torch.empty(2, 4)
    buffer[0] = x[0].sin()
    buffer[1] = x[1].cos()
    return buffer.exp() * torch.rand(4)


def _buffers(x: Tensor) -> Tensor:
    _buffer().mul_(0.5).add_(1)
    return _normed()(x.sin()).exp() * _buffer()


def _casts(x: Tensor) -> Tensor:
    with torch.autocast(on_device.device_type, torch.bfloat16):
        return (x @ _weight()).tanh() @ _weight()


class SquareAndBack(SavingSquare):
    """Saves its argument."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _nested(x: Tensor) -> Tensor:
    y = x.sin()
    with actckpt.region(["aten.tanh"]):
        y = y.exp().tanh().cos()
    return ours(sines, y).cos()


def _many(x: Tensor) -> Tensor:
    return x.sin().exp().tanh().cos().sigmoid().exp().sin().sum() + x.sort(0)[0].exp().var(1).sum()


POLICIES: dict[str, Any] = {
    "keep": "keep",
    "recompute": "recompute",
    "offload": "offload",
    "prefer_offload": "prefer_offload",
    "list": ["aten.exp"],
    "per op": actckpt.policies.PerOp({"aten.sin": "keep", "aten.exp": "offload"}, default="recompute"),
    "by value": lambda info: "keep" if info.index else "recompute",
}
REPLAYS: dict[str, Step] = {
    **{f"policy {name}": _replay(chain, policy) for name, policy in POLICIES.items()},
    "in place": _replay(_in_place),
    "filled": _replay(_filled),
    "buffers": _replay(_buffers),
    "casts": _replay(_casts),
    "function": _replay(lambda x: SquareAndBack.apply(x.sin()) * x),
    "nested": _replay(_nested),
    "many": _replay(_many),
    "failing forward": _replay(fails),
    "retained": _replay(_many, backward=_retained),
    "double": _replay(_many, backward=_double),
    "failing backward": _replay(_many, backward=_failing),
    "no backward": _replay(_many, backward=_none),
}
STEPS_OF = {
    f"{way} {name}": step for way, table in (("rerun", RERUNS), ("replay", REPLAYS)) for name, step in table.items()
}
SETTINGS: list[dict[str, Any]] = [{"audit": "always"}, {"audit": "off"}, {"opaque": ["aten.exp", "aten.mul"]}]


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in STEPS_OF), *(("replay many", settings) for settings in SETTINGS)]
)
def test_recomputing_gives_every_reference_back(name: str, settings: dict[str, Any]) -> None:
    actckpt.configure(**settings)
    x = leaf(2, 4)

    def step() -> None:
        with suppress(KeyError):
            STEPS_OF[name](x)

    assert_references_flat(step)


# Offloads.


def _overlapping(x: Tensor) -> Tensor:
    h = (x * 2).view(-1)
    return h[0:5].sin().sum() + h[3:8].exp().sum() + h.exp().sum()


def _both_kinds(x: Tensor) -> Tensor:
    y = ours(sines, x * 2)
    with actckpt.region(["aten.sin"]):
        return y.sin().exp().cos()


OFFLOADED: dict[str, Program] = {
    "chain": lambda x: chain(x * 2),
    "overlapping": _overlapping,
    "regions inside": _both_kinds,
    "subclass": lambda x: SavesBoth.apply(x, two_tensor(2, 4)),
    "failing forward": fails,
}


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    with faulty_store(folder, num_workers=0) as io:
        io.set(faults(fail_write_at=0, write_errno=errno.ENOSPC))
        yield


STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: store_of_kind("memory", num_workers=0),
    "disk": lambda folder: store_of_kind("disk", num_workers=0),
    "full disk": _full_disk,
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("program", OFFLOADED)
def test_offloading_gives_every_reference_back(program: str, store: str, tmp_path: Path) -> None:
    x = leaf(2, 4)

    def step() -> None:
        with suppress(KeyError):
            with actckpt.offload(min_bytes=0):
                y = OFFLOADED[program](x)
            flush()
            y.sum().backward()

    with STORES[store](tmp_path):
        assert_references_flat(step, STEPS if store == "memory" else STEPS // 4)


def test_a_context_around_the_training_loop_gives_every_reference_back() -> None:
    """Its lists of spans and sizes could keep an entry per tensor ever saved."""
    x = leaf(2, 4)
    with actckpt.offload(min_bytes=0):
        assert_references_flat(lambda: chain(x * 2).sum().backward())
