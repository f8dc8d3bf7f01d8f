"""What torch's checkpoint gets wrong: each test shows that it does, and that ours does not."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from input_routes import ROUTES
from oracle import Checkpoint, Log, Programs, assert_equal, leaf, ours, plain, theirs
from torch.overrides import TorchFunctionMode

import actckpt


def _read(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return (x * held).exp()


@pytest.mark.parametrize("kind", ["module", "forward", "__call__", "bias alone", "input without gradient", "autocast"])
def test_a_parameter_that_an_optimizer_moved_before_backward_raises(kind: str) -> None:
    def run(method: Checkpoint) -> torch.Tensor | None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
        x = torch.randn(2, 3, requires_grad=kind != "input without gradient")
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            y = method(getattr(model, kind) if kind in ("forward", "__call__") else model, x)
        moved = [model[0].bias] if kind == "bias alone" else list(model.parameters())
        for parameter in moved:
            parameter.grad = torch.ones_like(parameter)
        if method is not plain:
            torch.optim.SGD(moved, lr=1.0).step()
        y.float().sum().backward()
        return model[0].weight.grad if x.grad is None else x.grad

    assert not torch.equal(run(theirs), run(plain))
    name = "bias" if kind == "bias alone" else "weight"
    message = rf"(?s)Parameter '0.{name}'.*version 2.*version 1.*optimizer step"
    with pytest.raises(actckpt.errors.RerunMismatchError, match=message):
        run(ours)


def _is_alive_after_an_outer_region(route: str, method: Checkpoint) -> bool:
    storages = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        m = x.sin()
        storages.append(weakref.ref(m.untyped_storage()))
        return ROUTES[route](method, _read, x.cos(), m).sum()

    y = method(outer, leaf(3))
    alive = storages[0]() is not None
    y.backward()
    return alive


def test_an_outer_region_frees_arguments_of_an_inner_one() -> None:
    """torch packs positional tensors, actckpt also keyword arguments and what tuples hold."""
    for route in ("keyword", "tuple", "named tuple"):
        assert _is_alive_after_an_outer_region(route, theirs)
        assert not _is_alive_after_an_outer_region(route, ours)


def _draw(x: torch.Tensor, held: torch.Generator) -> torch.Tensor:
    return (x * torch.rand(3, generator=held)).exp()


@pytest.mark.parametrize("route", [name for name in ROUTES if not name.startswith("global")])
def test_explicit_generators_draw_the_same_again(route: str) -> None:
    def run(method: Checkpoint) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        y = ROUTES[route](method, _draw, x, generator)
        y = y + torch.rand(3, generator=generator)
        state = generator.get_state()
        y.sum().backward()
        return [x.grad, y.detach(), torch.equal(generator.get_state(), state)]

    expected = run(plain)
    assert not torch.equal(run(theirs)[0], expected[0])
    assert_equal(run(ours), expected)


class DoubleExp(TorchFunctionMode):
    """Runs exp as exp of the double."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.exp:
            return func(args[0] * 2)
        return func(*args, **(kwargs or {}))


def _x() -> torch.Tensor:
    return torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


#: What torch computes otherwise, and what it fails at.
wrong, failing = Programs(), Programs()


@wrong
def loop_variables_that_are_bound_anew(method: Checkpoint) -> torch.Tensor | None:
    weights = [torch.full((3,), float(i)) for i in range(1, 4)]
    x = h = _x()
    for scale, w in enumerate(weights, 1):
        h = method(lambda h: (h * w * scale).sin(), h)  # noqa: B023 - the point of the test
    h = h + x.cos()
    h.sum().backward()
    return x.grad


@wrong
def function_modes_of_the_forward(method: Checkpoint) -> torch.Tensor | None:
    x = _x()
    with DoubleExp():
        y = method(lambda x: x.exp().sin(), x)
    y.sum().backward()
    return x.grad


@wrong
def function_modes_at_the_time_of_a_rerun(method: Checkpoint) -> torch.Tensor:
    """Backward takes the user's modes off the stack, other readers of saved tensors do not."""
    y = method(lambda x: x.exp().sin(), _x())
    with DoubleExp():
        saved = y.grad_fn._saved_self
        is_doubled = bool(torch.ones(1).exp() > 5)  # the mode is still there
    assert is_doubled
    return saved.detach()


@failing
def the_default_dtype_of_the_forward(method: Checkpoint) -> torch.Tensor | None:
    x = _x()
    torch.set_default_dtype(torch.float64)
    try:
        y = method(lambda x: (x * torch.tensor([0.1, 0.2, 0.3])).exp(), x)
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()
    assert torch.get_default_dtype() is torch.float32
    return x.grad


@failing.each(reads=[2, 3])
def saved_tensors_that_are_read_several_times_in_one_backward(method: Checkpoint, reads: int) -> Any:
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            for _ in range(reads - 1):
                assert len(ctx.saved_tensors) == 2
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    calls = Log()
    x, w = _x(), torch.tensor([0.3, 0.4, 0.5], requires_grad=True)
    y = method(lambda x, w: (calls.append(1), Read.apply(x.sin(), w.sin()).exp())[1], x, w)
    y.sum().backward()
    assert len(calls) <= 3, "one rerun for the first read, one for all others"
    return [x.grad, w.grad]


@failing
def code_that_catches_exceptions_around_the_last_saving_operator(method: Checkpoint) -> torch.Tensor | None:
    caught = []

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            x = x.exp()
        except Exception as error:
            caught.append(error)
            x = torch.zeros(3)
        return x + 1

    x = _x()
    method(function, x).sum().backward()
    if caught:
        raise RuntimeError("the rerun's stop came through user code")
    return x.grad


@pytest.mark.parametrize("name", wrong)
def test_what_torch_gets_wrong_is_right(name: str) -> None:
    assert not torch.equal(wrong[name](theirs), wrong[name](plain))
    assert_equal(wrong[name](ours), wrong[name](plain))


@pytest.mark.parametrize("name", failing)
def test_what_torch_fails_at_is_right(name: str) -> None:
    with pytest.raises(RuntimeError):  # CheckpointError, too
        failing[name](theirs)
    assert_equal(failing[name](ours), failing[name](plain))


def test_code_that_catches_even_base_exceptions_gets_right_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            try:
                x = x.exp()
            except BaseException:
                x = x.sin().cos()
        return x

    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    ours(function, x).sum().backward()
    assert_equal(x.grad, expected)


def test_a_tensor_changed_in_place_after_it_was_saved_inside_raises_as_without_checkpointing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.sin() * y
        y.add_(1)
        return z * y.exp()

    def run(method: Checkpoint) -> None:
        method(function, leaf(3)).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(plain)
    run(theirs)  # silently wrong
    with pytest.raises(
        actckpt.errors.SavedTensorChangedError, match=r"(?s)modified by an inplace operation.*version 1; expected"
    ):
        run(ours)
