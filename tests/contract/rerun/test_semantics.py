"""Programs with bit-equal outputs and gradients: plain autograd, torch's checkpoint, ours."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import ROUTES
from oracle import BOTH, Checkpoint, Programs, assert_as_plain, gradients, leaf, mlp, ours

Pair = namedtuple("Pair", ["first", "second"])


programs = Programs()


@pytest.mark.parametrize("name", programs)
def test_programs_are_bit_equal(name: str) -> None:
    assert_as_plain(programs[name])


def _in_both_defaults(checkpoint: Checkpoint, read: Any, x: torch.Tensor, m: torch.Tensor) -> Any:
    def function(x: torch.Tensor, m: torch.Tensor = m, *, n: torch.Tensor = m.cos()) -> torch.Tensor:  # noqa: B008
        return (x * m * n).exp()

    return checkpoint(function, x)


def _twice_the_same(checkpoint: Checkpoint, read: Any, x: torch.Tensor, m: torch.Tensor) -> Any:
    def function(a: torch.Tensor, b: torch.Tensor, c: list[torch.Tensor]) -> torch.Tensor:
        assert a is b and a is c[0]
        return (a * b * c[0] * m).exp()

    return checkpoint(function, x, x, [x])


INPUTS: dict[str, Any] = ROUTES | {
    "both in a tuple": lambda ck, read, x, m: ck(lambda pair: read(pair.first, pair.second), Pair(x, m)),
    "structseq": lambda ck, read, x, m: ck(lambda top, m: read(top.values, m[:, :1]), x.max(dim=1, keepdim=True), m),
    "partial with both": lambda ck, read, x, m: ck(partial(lambda m, x, *, n: read(x, m * n), m, n=m.sin()), x),
    "both defaults": _in_both_defaults,
    "twice the same": _twice_the_same,
}


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_tensors_are_differentiated_wherever_they_stand_among_the_inputs(name: str, is_leaf: bool) -> None:
    def program(checkpoint: Checkpoint) -> Any:
        x, m = leaf(3, 4), leaf(3, 4)
        inputs = (x, m) if is_leaf else (x.sin(), m.sin())
        y = INPUTS[name](checkpoint, lambda x, held: (x * held).exp(), *inputs)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return y, x.grad, m.grad

    assert_as_plain(program)


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


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * x * w
        ctx.save_for_backward(x, w, y)
        ctx.plain = 2.0
        return y, y.sum()

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad_sum: torch.Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        grad = grad_y + grad_sum
        return grad * ctx.plain * x * w + 0 * y, grad * x * x


@programs
def custom_functions(checkpoint: Checkpoint) -> Any:
    x, w = leaf(3, 4), leaf(3, 4)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, total = Square.apply(x.sin(), w)
        return (y * total).tanh()

    y = checkpoint(function, x, w)
    y.sum().backward()
    return y, x.grad, w.grad


@programs
def result_changed_in_place_after_the_region(checkpoint: Checkpoint) -> Any:
    x = leaf(3, 4)
    y = checkpoint(lambda x: x.sin() @ x.t(), x)
    y.mul_(2).relu_()
    y.sum().backward()
    return y, x.grad


@programs
def a_view_of_the_input_as_result(checkpoint: Checkpoint) -> Any:
    x = leaf(3, 4)
    y = checkpoint(lambda x: x.t()[1:], x.exp())
    y.sin().sum().backward()
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
