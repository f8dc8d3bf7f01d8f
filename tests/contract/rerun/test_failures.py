"""Exceptions in forward and in the rerun: everything is left as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import BOTH, Checkpoint, Log, assert_equal, leaf, mlp, ours, soon

import actckpt


def _global_state() -> dict[str, Any]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "random": torch.get_rng_state(),
        "dtype": str(torch.get_default_dtype()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
    }


class FailsOnCall:
    """Fails at one of its calls, after it has drawn and saved something."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.calls, self.call, self.error = Log(), call, error

    def __call__(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.calls.append(1)
        x = torch.nn.functional.dropout(x, 0.5).exp()
        if len(self.calls) == self.call:
            raise self.error
        return x.sin().exp()


class AsModule(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "common": (AsModule, {}),
    "keywords": (AsModule, {"k": torch.ones(2)}),
    "debug": (AsModule, {"debug": True}),
    "contexts": (AsModule, {"context_fn": lambda: (nullcontext(), nullcontext())}),
    "function": (lambda function: function, {}),
    "nested": (lambda function: lambda x, **kwargs: ours(AsModule(function), x.sin(), **kwargs), {}),
}


@pytest.mark.parametrize(
    "error", [KeyError("user"), KeyboardInterrupt(), StopIteration()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_forward_leaves_no_trace(kind: str, error: BaseException) -> None:
    wrap, keywords = KINDS[kind]
    before = _global_state()
    with pytest.raises(type(error)) as caught:
        ours(wrap(FailsOnCall(1, error)), leaf(3), **keywords, preserve_rng_state=True)
    assert caught.value is error
    del before["random"]  # the forward did draw
    after = _global_state()
    assert_equal({name: after[name] for name in before}, before)


@pytest.mark.parametrize("error", [KeyError("user"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_the_rerun_is_the_users_leaves_no_trace_and_backward_may_be_tried_again(
    kind: str, error: BaseException
) -> None:
    wrap, keywords = KINDS[kind]
    x = leaf(3)
    torch.manual_seed(1)
    expected = torch.autograd.grad(wrap(FailsOnCall(99, error))(x).sum(), x)[0]
    torch.manual_seed(1)
    y = ours(wrap(FailsOnCall(2, error)), x, **keywords).sum()
    before = _global_state()
    with pytest.raises(type(error)) as caught:
        y.backward(retain_graph=True)
    assert caught.value is error
    assert_equal(_global_state(), before)
    assert x.grad is None
    y.backward()
    assert_equal(x.grad, expected)


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_results_that_escaped_a_failed_forward_can_be_differentiated(method: Checkpoint) -> None:
    escaped = []

    def function(x: torch.Tensor) -> torch.Tensor:
        escaped.append(x.sin().exp())
        raise KeyError("after it")

    x = leaf(3)
    with pytest.raises(KeyError):
        method(function, x)
    first = escaped[0]
    first.sum().backward()
    assert_equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("kind", ["shape", "fewer", "more", "user"])
def test_a_failed_backward_frees_everything_with_its_graph(kind: str) -> None:
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "shape": lambda x: x[1:].sin().exp(),
        "fewer": lambda x: x.sin(),
        "more": lambda x: x.sin().exp().sin().exp(),
        "user": lambda x: {}["user"],
    }
    runs = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else ways[kind](x)

    # In one frame: until Python 3.13 reading `frame.f_locals` (messages._in_module) leaves a copy of all locals in it.
    middle = leaf(3) * 2
    storage = weakref.ref(middle.untyped_storage())
    y = ours(function, middle, early_stop=False).sum()
    del middle
    with pytest.raises((actckpt.errors.RerunMismatchError, KeyError)):
        y.backward()
    del y
    gc.collect()
    assert soon(lambda: storage() is None)


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_gradients_of_parameters_stay_as_they_were_when_the_last_rerun_fails(method: Checkpoint) -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    y = method(FailsOnCall(2, KeyError("rerun")), method(model, leaf(3, 8)))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_an_error_of_the_inner_region_names_the_inner_function() -> None:
    runs = Log()

    def inner(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) < 3 else x[1:].sin().exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return ours(inner, x.cos()).tanh()

    y = ours(outer, leaf(3))
    with pytest.raises(actckpt.errors.RerunMismatchError, match="inner"):
        y.sum().backward()
