"""500 reruns of each kind give every reference back: internals/references.py tells how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from internals.references import SavesBoth, assert_references_flat, fails, sines
from offload_oracle import TwoTensor
from oracle import leaf, ours

import actckpt


def _keywords_and_containers(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, items: list[Any], *, named: dict[str, Any]) -> Any:
        items.append(x.exp())
        named["made"] = items[-1].sin()
        return {"y": (named["made"] * items[0], [x.cos()])}

    y = ours(function, x, [x * 2], named={"a": x.sin(), "b": (x, {"c": x})})["y"]
    (y[0] + y[1][0]).sum().backward()


_generator = torch.Generator()


def _generators(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (x * torch.rand(2, 4, generator=generator)).sin() * torch.rand(4)

    ours(function, x, _generator).sum().backward()


def _settings_of_torch(x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        y = ours(lambda x: (x @ x.T).sin(), x, debug=True, early_stop=False)
    y.sum().backward()


def _failing_forward(x: torch.Tensor) -> None:
    with suppress(KeyError):
        ours(fails, x)


def _differs(second: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Return a step whose rerun runs something else than its forward."""

    def step(x: torch.Tensor) -> None:
        ways = iter((sines, second))
        with suppress(KeyError, actckpt.CheckpointError):
            ours(lambda x: next(ways)(x), x).sum().backward()

    return step


def _changed_input(x: torch.Tensor) -> None:
    a = x * 2
    y = ours(sines, a)
    with torch.no_grad():
        a.mul_(2)
    with suppress(actckpt.CheckpointError):
        y.sum().backward()


def _failing_backward(x: torch.Tensor) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise KeyError(grad)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(fail)
        return y.exp()

    with suppress(KeyError):
        ours(function, x).sum().backward()


def _closure_and_module(x: torch.Tensor) -> None:
    scale, layer = x.cos(), torch.nn.Linear(4, 4)
    ours(lambda x: layer(x * scale).sin(), x).sum().backward()


def _contexts() -> tuple[Any, Any]:
    return torch.autocast("cpu", torch.bfloat16), torch.enable_grad()


def _retained(x: torch.Tensor) -> None:
    y = ours(sines, x).sum()
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
    y.backward()


def _double_backward(x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(ours(sines, x).sum(), x, create_graph=True)
    grad.sum().backward()


_normed = functools.cache(lambda: torch.nn.BatchNorm1d(4))
_offloading = functools.partial(ours, offload_inputs=True)
RERUNS: dict[str, Callable[[torch.Tensor], object]] = {
    "common": lambda x: ours(sines, x).sum().backward(),
    "keywords and containers": _keywords_and_containers,
    "closure and module": _closure_and_module,
    "buffers": lambda x: ours(_normed(), x).sum().backward(),
    "generators": _generators,
    "contexts": lambda x: ours(sines, x, context_fn=_contexts).sum().backward(),
    "settings of torch": _settings_of_torch,
    "failing forward": _failing_forward,
    "failing rerun": _differs(fails),
    "another rerun": _differs(lambda x: x[1:].sin().exp()),
    "changed input": _changed_input,
    "failing backward": _failing_backward,
    "retain_graph": _retained,
    "double backward": _double_backward,
    "part of a graph": lambda x: torch.autograd.grad(ours(lambda x: (x.sin().exp(), x.cos().exp()), x)[0].sum(), x),
    "dropped": lambda x: ours(sines, x),
    "nested": lambda x: ours(lambda x: ours(sines, x.cos()).tanh(), x).sum().backward(),
    "subclass": lambda x: ours(SavesBoth.apply, x, TwoTensor(torch.ones(4), torch.ones(4))).sum().backward(),
    "offloaded inputs": lambda x: _offloading(sines, _offloading(sines, x * 2)).sum().backward(),
}


@pytest.mark.parametrize("kind", RERUNS)
def test_reruns_give_every_reference_back(kind: str) -> None:
    x = leaf(2, 4)
    assert_references_flat(lambda: RERUNS[kind](x))
