"""Programs with bit-equal outputs and gradients: plain autograd, torch's checkpoint, ours."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import BOTH, Checkpoint, Programs, assert_as_plain, gradients, leaf, mlp, ours

Pair = namedtuple("Pair", ["first", "second"])


programs = Programs()


@pytest.mark.parametrize("name", programs)
def test_programs_are_bit_equal(name: str) -> None:
    assert_as_plain(programs[name])


def _twice_the_same(a: torch.Tensor, b: torch.Tensor, c: list[torch.Tensor]) -> torch.Tensor:
    assert a is b and a is c[0]
    return (a * b * c[0]).exp()


#: Beside those that random programs draw (test_property.py).
INPUTS: dict[str, Any] = {
    "in a tuple": lambda ck, x, m: ck(lambda pair: pair.first * pair.second, Pair(x, m)),
    "structseq": lambda ck, x, m: ck(lambda top, m: top.values * m[:, :1], x.max(dim=1, keepdim=True), m),
    "partial": lambda ck, x, m: ck(partial(lambda m, x, *, n: x * m * n, m, n=m.sin()), x),
    "twice the same": lambda ck, x, m: ck(_twice_the_same, x, x, [x]) * m,
}


@programs.each(place=INPUTS, is_leaf=[True, False])
def tensors_that_stand_among_the_inputs(checkpoint: Checkpoint, place: Any, is_leaf: bool) -> Any:
    x, m = leaf(3, 4), leaf(3, 4)
    y = place(checkpoint, *((x, m) if is_leaf else (x.sin(), m.sin()))).exp()
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return y, x.grad, m.grad


@pytest.mark.parametrize(
    ("arguments", "function"),
    [
        ((None, 3, "sin"), lambda x, a, b, c: getattr(x, c)() * b),
        ((torch.float32, torch.device("cpu"), (1, 2)), lambda x, a, b, c: x.to(b, a).exp() * c[1]),
        (({"a": [1, {}]}, object(), {1}), lambda x, a, b, c: x.exp() * a["a"][0]),
    ],
)
def test_arguments_that_are_no_tensors_are_passed_on(arguments: Any, function: Callable[..., Any]) -> None:
    def program(checkpoint: Checkpoint) -> Any:
        x = leaf(3, 4)
        y = checkpoint(function, x, *arguments)
        y.sum().backward()
        return y, x.grad

    assert_as_plain(program)


@pytest.mark.parametrize(
    "result",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, None, (b, "text", 3)],
        lambda a, b: {"a": a, "b": {"b": b, "n": None}},
        lambda a, b: Pair(a, b),
        lambda a, b: (a, a, b.detach()),
    ],
)
def test_results_are_returned_as_the_function_made_them(result: Callable[..., Any]) -> None:
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value] if value.requires_grad else []
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
        return [tensor for part in parts for tensor in tensors(part)]

    def program(checkpoint: Checkpoint) -> Any:
        x = leaf(3, 4)
        y = checkpoint(lambda x: result(x.sin().exp(), x.cos().exp()), x)
        sum(tensor.sum() for tensor in tensors(y)).backward()
        return y, x.grad

    assert_as_plain(program)


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_results_without_tensors_are_returned(method: Checkpoint) -> None:
    assert method(lambda x: None, leaf(2)) is None
    assert method(lambda: 3) == 3


def test_without_grad_mode_the_function_is_just_called() -> None:
    x = leaf(3)
    with torch.no_grad():
        y = ours(lambda x, *, k: x.sin() * k, x, k=2)
    assert not y.requires_grad
    assert not ours(lambda x: x.sin().exp(), torch.randn(3)).requires_grad
    with torch.inference_mode():
        assert ours(torch.sin, x).is_inference()


@programs
def inputs_without_grad_still_give_parameters_their_gradients(checkpoint: Checkpoint) -> Any:
    model, x = mlp(dropout=0.5), torch.randn(3, 8)
    y = checkpoint(model, x)
    y.sum().backward()
    return y, gradients(model)


@programs
def result_changed_in_place_after_the_region(checkpoint: Checkpoint) -> Any:
    x = leaf(3, 4)
    y = checkpoint(lambda x: x.sin() @ x.t(), x)
    y.mul_(2).relu_()
    y.sum().backward()
    return y, x.grad


@programs
def complex_numbers_and_lazy_conjugation(checkpoint: Checkpoint) -> Any:
    z, x = leaf(3, 3, dtype=torch.complex64), leaf(3, 3)

    def function(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real((z.conj() @ z.mH * x).imag.neg() + 1j * z.abs()).sin()

    y = checkpoint(function, z.conj(), x)
    y.sum().backward()
    return y, z.grad, x.grad


@programs.each(inside=[True, False], in_backward=[True, False], cache=[True, False])
def autocast(checkpoint: Checkpoint, inside: bool, in_backward: bool, cache: bool) -> Any:
    model, x = mlp(dropout=0.2), leaf(3, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside, cache_enabled=cache):
        y = checkpoint(function if inside else model, x)
        y = checkpoint(model, y.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=in_backward):
        y.float().sum().backward()
    return y, x.grad, gradients(model)


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_disabled_saved_tensor_hooks_raise_the_users_message(method: Checkpoint) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
    ):
        method(mlp(), leaf(3, 8))
    method(mlp(), leaf(3, 8)).sum().backward()
