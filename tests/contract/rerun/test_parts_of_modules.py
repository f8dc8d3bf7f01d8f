"""Modules with the weights of `functional_call`, and modules whose parts run in regions of their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import MODULE_CALLS
from oracle import Checkpoint, CountOperators, assert_equal, gradients, leaf, ours, plain, soon
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import actckpt


class Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.call(self.inner, x)
        return y


@pytest.mark.parametrize("call", MODULE_CALLS)
def test_functional_call_computes_the_gradients_of_its_own_weights(call: str) -> None:
    def run(how: Callable[..., torch.Tensor]) -> list[Any]:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh())
        outer, x = Outer(inner, how), leaf(4, 3)
        mine = {name: (p.detach() * 2).requires_grad_() for name, p in outer.named_parameters()}
        buffers = {name: b.clone() for name, b in outer.named_buffers()}
        before = dict(outer.named_parameters())
        y = torch.func.functional_call(outer, (mine, buffers), (x,))
        y.sum().backward()
        assert all(parameter is before[name] for name, parameter in outer.named_parameters())
        return [x.grad, *(p.grad for p in mine.values()), gradients(outer), *buffers.values(), *outer.buffers()]

    assert_equal(run(partial(MODULE_CALLS[call], ours)), run(partial(MODULE_CALLS[call], plain)))


def test_weights_of_functional_call_that_changed_in_place_raise() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    weights = {f"inner.{name}": (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(Outer(model, ours), weights, (leaf(2, 3),))
    with torch.no_grad():
        weights["inner.0.bias"].add_(1)
    with pytest.raises(actckpt.errors.RerunMismatchError, match=r"version 1; it was at version 0"):
        y.sum().backward()


def test_a_parameter_that_goes_while_it_is_copied_is_held() -> None:
    # One of inference mode has no version, so it is copied, and code of the user runs then: "make sanitize" sees more.
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.spare: torch.nn.Parameter | None = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp()

    class Removes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.clone:
                module.spare = None
            return result

    module, x = Module(), leaf(3)
    spare = weakref.ref(module.spare)
    with Removes():
        y = ours(module, x)
    assert module.spare is None and spare() is not None
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad(module(x).sum(), x))
    del y
    gc.collect()
    assert soon(lambda: spare() is None)


class Stages(torch.nn.Module):
    """Two parts, each run in a region of its own; the second changes a buffer."""

    def __init__(self, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), second

    def run_first(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x).exp()


SECOND: dict[str, Callable[[Checkpoint, Stages, torch.Tensor], torch.Tensor]] = {
    "method": lambda checkpoint, model, x: checkpoint(model.run_second, x),
    "module": lambda checkpoint, model, x: checkpoint(model.second, x).exp(),
    "closure": lambda checkpoint, model, x: checkpoint(lambda h: model.second(h).exp(), x),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("call", SECOND)
def test_a_module_is_watched_until_a_region_calls_it(call: str, is_training: bool) -> None:
    def program(checkpoint: Checkpoint) -> Any:
        torch.manual_seed(0)
        model, found = Stages(parametrizations.spectral_norm(torch.nn.Linear(4, 4))), []
        model.train(is_training)
        for _ in range(3):
            x = leaf(2, 4)
            SECOND[call](checkpoint, model, checkpoint(model.run_first, x)).sum().backward()
            found += [x.grad, gradients(model), [buffer.clone() for buffer in model.buffers()]]
        return found

    assert_equal(program(ours), program(plain))


def test_a_module_that_no_region_calls_costs_no_operator_after_the_first_step() -> None:
    model = Stages(torch.nn.BatchNorm1d(4).eval())

    def operators() -> int:
        with CountOperators() as counted:
            y = ours(model.run_first, leaf(2, 4))
        y.sum().backward()
        return counted.total

    assert operators() == operators()


def test_statistics_of_a_batch_norm_that_no_region_calls_are_not_copied_in_reruns() -> None:
    model = Stages(torch.nn.BatchNorm1d(4))
    for method in (model.run_first, model.run_second):
        y = ours(method, leaf(2, 4))
        with CountOperators() as counted:
            y.sum().backward()
        assert ("aten.clone.default" in counted.counts) is (method == model.run_second)
