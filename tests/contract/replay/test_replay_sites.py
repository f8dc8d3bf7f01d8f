"""What one function has shown in its audit says nothing about another one: each has a site of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import memory_of
from oracle import assert_equal, num_checksums
from torch import Tensor

import actckpt

Function = Callable[[Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """Twice its argument; where `raw`, a kernel that torch knows nothing of puts five times there instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: bool) -> Tensor:
        out = x * 2
        if raw:
            memory_of(out)[:] = memory_of(x) * 5
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def tame(x: Tensor) -> Tensor:
    return Doubled.apply(x.sin(), False)


def wild(x: Tensor) -> Tensor:
    return Doubled.apply(x.sin(), True)


class Layer(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def tame(self, x: Tensor) -> Tensor:
        return tame(x)

    def wild(self, x: Tensor) -> Tensor:
        return wild(x)


class Callee:
    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


class Methods:
    @actckpt.region()
    def tame(self, x: Tensor) -> Tensor:
        return tame(x)

    @actckpt.region()
    def wild(self, x: Tensor) -> Tensor:
        return wild(x)


def _through(function: Function) -> Function:
    return lambda x: function(x)


def _stacked(function: Function) -> Function:
    def run(x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(actckpt.region())
            return function(x)

    return run


def _stacked_elsewhere(function: Function) -> Function:
    def other(x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(actckpt.region())
            return function(x)

    return other


@contextlib.contextmanager
def _my_region() -> Iterator[None]:
    with actckpt.region():
        yield


def _with_mine(x: Tensor) -> Tensor:
    with _my_region():
        return tame(x)


def _with_mine_too(x: Tensor) -> Tensor:
    with _my_region():
        return wild(x)


def _checkpointed(function: Any) -> Function:
    return lambda x: actckpt.checkpoint(function, x, policy=[])


#: Ways to wrap a function so that its calls have a site of its own.
_WRAPPED: dict[str, Callable[[Function], Function]] = {
    "functions": lambda function: actckpt.region()(function),
    "modules of one type": lambda function: actckpt.region()(Layer(function)),
    "closures of one factory": lambda function: actckpt.region()(_through(function)),
    "closures in closures": lambda function: actckpt.region()(_through(_through(function))),
    "partials": lambda function: actckpt.region()(functools.partial(lambda f, x: f(x), function)),
    "callable objects": lambda function: actckpt.region()(Callee(function)),
    "checkpointed functions": _checkpointed,
    "checkpointed closures": lambda function: _checkpointed(_through(function)),
    "checkpointed objects": lambda function: _checkpointed(Callee(function)),
}
_layer = Layer(tame)
_PAIRS: dict[str, tuple[Function, Function]] = {
    **{name: (wrap(tame), wrap(wild)) for name, wrap in _WRAPPED.items()},
    "methods of a class": (Methods().tame, Methods().wild),
    "methods of a module": (actckpt.region()(_layer.tame), actckpt.region()(_layer.wild)),
    "checkpointed methods": (_checkpointed(_layer.tame), _checkpointed(_layer.wild)),
    "exit stacks": (_stacked(tame), _stacked_elsewhere(wild)),
    "generators as contexts": (_with_mine, _with_mine_too),
}


def _gradient(function: Function, x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x).exp().sum(), x)[0]


@pytest.mark.parametrize("name", _PAIRS)
@pytest.mark.filterwarnings("ignore:.*came back from replay with other bytes:UserWarning")
def test_the_audit_of_one_function_does_not_pass_another_one_of_the_same_operators(name: str) -> None:
    first, second = _PAIRS[name]
    x = torch.randn(3, 5, requires_grad=True)
    for _ in range(3):
        assert_equal(_gradient(first, x), _gradient(tame, x))
    expected = _gradient(wild, x)
    refused = 0
    for _ in range(3):
        try:
            found = _gradient(second, x)
        except actckpt.errors.AuditError:
            refused += 1
        else:
            assert_equal(found, expected)
    assert refused <= 1


@pytest.mark.parametrize("is_decorated", [True, False])
def test_a_function_that_is_made_anew_at_each_call_is_audited_once(is_decorated: bool) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Tanh())

    def step() -> None:
        function = lambda x: layer(x).exp()  # noqa: E731
        y = actckpt.region()(function)(x) if is_decorated else actckpt.checkpoint(function, x, policy=[])
        y.sum().backward()

    assert num_checksums(step) > 0
    assert [num_checksums(step) for _ in range(3)] == [0, 0, 0]
