"""2,000 reruns of each kind give every reference back: references.py tells how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from offload_oracle import TwoTensor
from oracle import Log, leaf, ours
from references import SavesBoth, assert_references_flat, sines

import actckpt


def _common(x: torch.Tensor) -> None:
    ours(sines, x).sum().backward()


def _keywords_and_containers(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, items: list[Any], *, named: dict[str, Any]) -> Any:
        items.append(x.exp())
        named["made"] = items[-1].sin()
        return {"y": (named["made"] * items[0], [x.cos()])}

    y = ours(function, x, [x * 2], named={"a": x.sin(), "b": (x, {"c": x})})["y"]
    (y[0] + y[1][0]).sum().backward()


def _closure_and_module(x: torch.Tensor) -> None:
    scale = x.cos()
    layer = torch.nn.Linear(4, 4)
    ours(lambda x: layer(x * scale).sin(), x).sum().backward()


@functools.cache
def _normed() -> torch.nn.Module:
    return torch.nn.BatchNorm1d(4)


def _buffers_of_a_module(x: torch.Tensor) -> None:
    ours(_normed(), x).sum().backward()


_generator = torch.Generator()


def _generators(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (x * torch.rand(2, 4, generator=generator)).sin() * torch.rand(4)

    ours(function, x, _generator).sum().backward()


def _contexts(x: torch.Tensor) -> None:
    contexts = lambda: (torch.autocast("cpu", torch.bfloat16), torch.enable_grad())  # noqa: E731
    ours(sines, x, context_fn=contexts).sum().backward()


def _settings_of_torch(x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        y = ours(lambda x: (x @ x.T).sin(), x, debug=True, early_stop=False)
    y.sum().backward()


def _failing_forward(x: torch.Tensor) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        raise KeyError(x.sin().exp())

    with suppress(KeyError):
        ours(function, x)


def _failing_rerun(x: torch.Tensor) -> None:
    runs = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = x.sin().exp()
        if len(runs) > 1:
            raise KeyError(y)
        return y

    with suppress(KeyError):
        ours(function, x).sum().backward()


def _other_rerun(x: torch.Tensor) -> None:
    runs = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[1:].sin().exp()

    with suppress(actckpt.CheckpointError):
        ours(function, x).sum().backward()


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


def _retained(x: torch.Tensor) -> None:
    y = ours(sines, x).sum()
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
    y.backward()


def _double_backward(x: torch.Tensor) -> None:
    y = ours(sines, x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()


def _part_of_a_graph(x: torch.Tensor) -> None:
    y = ours(lambda x: (x.sin().exp(), x.cos().exp()), x)
    torch.autograd.grad(y[0].sum(), x)


def _dropped(x: torch.Tensor) -> None:
    ours(sines, x)


def _nested_reruns(x: torch.Tensor) -> None:
    ours(lambda x: ours(sines, x.cos()).tanh(), x).sum().backward()


def _subclass(x: torch.Tensor) -> None:
    ours(lambda x, t: SavesBoth.apply(x, t), x, TwoTensor(torch.ones(4), torch.ones(4))).sum().backward()


def _offloaded_inputs(x: torch.Tensor) -> None:
    ours(sines, ours(sines, x * 2, offload_inputs=True), offload_inputs=True).sum().backward()


RERUNS: dict[str, Callable[[torch.Tensor], None]] = {
    "common": _common,
    "keywords and containers": _keywords_and_containers,
    "closure and module": _closure_and_module,
    "buffers": _buffers_of_a_module,
    "generators": _generators,
    "contexts": _contexts,
    "settings of torch": _settings_of_torch,
    "failing forward": _failing_forward,
    "failing rerun": _failing_rerun,
    "another rerun": _other_rerun,
    "changed input": _changed_input,
    "failing backward": _failing_backward,
    "retain_graph": _retained,
    "double backward": _double_backward,
    "part of a graph": _part_of_a_graph,
    "dropped": _dropped,
    "nested": _nested_reruns,
    "subclass": _subclass,
    "offloaded inputs": _offloaded_inputs,
}


@pytest.mark.parametrize("kind", RERUNS)
def test_reruns_give_every_reference_back(kind: str) -> None:
    x = leaf(2, 4)
    assert_references_flat(lambda: RERUNS[kind](x))
