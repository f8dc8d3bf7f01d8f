"""Tensors that a rerun needs as they were: changed in place, given other memory, swapped, in arguments and objects."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import ROUTES
from oracle import Checkpoint, assert_equal, leaf, ours, plain
from torch.testing._internal.two_tensor import TwoTensor

import actckpt


def _swap(t: torch.Tensor) -> None:
    torch.utils.swap_tensors(t, torch.full((3,), 9.0))


def _assign_data(t: torch.Tensor) -> None:
    t.data = torch.full((3,), 9.0)


def _multiplied(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return (x * held).exp()


INPUTS: dict[str, Any] = ROUTES | {
    "module": lambda ck, read, x, t: ck(Multiply(), x, t),
    "set": lambda ck, read, x, t: ck(lambda x, ts: read(x, next(iter(ts))), x, {t}),
    "buffer": lambda ck, read, x, t: ck(_module_with_buffer(t), x),
}
del INPUTS["global of another function"]  # not checked for other memory


def _module_with_buffer(t: torch.Tensor) -> torch.nn.Module:
    module = Scale()
    module.register_buffer("t", t)
    return module


class Scale(torch.nn.Module):
    t: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.t).exp()


class Multiply(torch.nn.Module):
    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x * t).exp()


@pytest.mark.parametrize("change", [_assign_data, _swap])
@pytest.mark.parametrize("place", INPUTS)
def test_an_input_that_was_given_other_memory_raises_or_is_right(place: str, change: Callable[..., None]) -> None:
    def run(checkpoint: Checkpoint, *, changes: bool) -> torch.Tensor | None:
        x, t = torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
        y = INPUTS[place](checkpoint, _multiplied, x, t)
        if changes:
            change(t)
        y.sum().backward()
        return x.grad

    try:
        actual = run(ours, changes=True)
    except RuntimeError as error:
        assert "other memory" in str(error) or "Cannot swap" in str(error)
    else:
        assert_equal(actual, run(plain, changes=False))


def _gradient_after_swap(call: Callable[..., Any], t: torch.Tensor, *, swaps: bool) -> torch.Tensor:
    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    y = call(x, t)
    if swaps:
        torch.utils.swap_tensors(t, torch.full_like(t, 9.0))
    return torch.autograd.grad(y.sum(), x)[0]  # leaves the node alone that swap_tensors would make raise


SWAPPED: dict[str, Callable[..., Any]] = {
    "argument of a module": lambda x, p: ours(Multiply(), x, p),
    **{name: partial(ROUTES[name], ours, _multiplied) for name in ("positional", "object")},
    "parameter": lambda x, p: ours(_module_with_parameter(p), x),
    "not saved": lambda x, p: ours(lambda x, p: (x + p).exp(), x, p),
}


def _module_with_parameter(p: torch.nn.Parameter) -> torch.nn.Module:
    module = Scale()
    module.register_parameter("t", p)
    return module


@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("place", SWAPPED)
def test_a_tensor_that_is_swapped_after_the_forward_raises(place: str, is_parameter: bool) -> None:
    t = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    t = torch.nn.Parameter(t.detach()) if is_parameter or place == "parameter" else t
    with pytest.raises(actckpt.CheckpointError, match=r"other memory|another tensor|other bytes"):
        _gradient_after_swap(SWAPPED[place], t, swaps=True)


@pytest.mark.parametrize("kind", ["constant", "leaf", "parameter"])
def test_a_tensor_that_offload_leaves_where_it_is_cannot_be_swapped(kind: str) -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with actckpt.offload():
            return (x * t).exp()

    t = torch.tensor([1.0, 2.0, 3.0], requires_grad=kind == "leaf")
    t = torch.nn.Parameter(t) if kind == "parameter" else t
    with pytest.raises(RuntimeError, match="weakref"):
        _gradient_after_swap(call, t, swaps=True)
    assert_equal(_gradient_after_swap(call, t, swaps=False), _gradient_after_swap(Multiply(), t, swaps=False))


@pytest.mark.parametrize("policy", ["recompute", "keep", "offload"])
def test_memory_that_is_swapped_after_a_region_raises_at_once_or_is_right(policy: str) -> None:
    x, t = torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    with actckpt.region(policy):
        y = (x * t).exp()
    try:
        _swap(t)
    except RuntimeError as error:
        # Plain autograd: "... gradient edge ..." of a constant, "Expected use_count ..." of others.
        assert "weakref" in str(error) or "gradient edge" in str(error)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() * (t1 := torch.tensor([1.0, 2.0, 3.0]))).exp() * t1)


def test_memory_that_an_input_gets_back_does_no_harm() -> None:
    x, t = leaf(3), torch.ones(3)
    y = ours(lambda x, t: (x * t).exp(), x, t)
    before = t.data
    t.data = torch.zeros(3)
    t.data = before
    y.sum().backward()
    assert_equal(x.grad, x.detach().exp())


@pytest.mark.parametrize("kind", ["set", "deque"])
def test_a_tensor_in_a_set_or_deque_that_was_changed_in_place_raises(kind: str) -> None:
    t = torch.ones(3)
    holder = {t} if kind == "set" else collections.deque([t])
    y = ours(lambda x, ts: (x * next(iter(ts))).exp(), leaf(3), holder)
    t.add_(1)
    with pytest.raises(actckpt.errors.InputChangedError, match="Argument 1"):
        y.sum().backward()


class Holder:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.__dict__.update(tensors)


OBJECT_PROGRAMS: dict[str, Callable[[torch.Tensor, Holder], torch.Tensor]] = {
    "saved": lambda x, o: (x * o.t).exp(),
    "not saved": lambda x, o: (x + o.t).exp(),
    "view": lambda x, o: (x + o.t[:3]).exp(),
}


@pytest.mark.parametrize("program", ["not saved", "view"])
def test_an_inference_tensor_of_an_object_that_was_changed_raises_where_it_is_read(program: str) -> None:
    with torch.inference_mode():
        o = Holder(t=torch.ones(3), other=torch.ones(3))
    y = ours(OBJECT_PROGRAMS[program], leaf(3), o)
    with torch.inference_mode():
        o.t.add_(1)
    with pytest.raises(actckpt.errors.InputChangedError, match=r"(?s)Argument 1\.t.*inference tensor"):
        y.sum().backward()


def test_a_subclass_tensor_of_an_object_that_was_changed_raises() -> None:
    o = Holder(t=TwoTensor(torch.ones(3), torch.ones(3)))
    y = ours(lambda x, o: x.exp() + o.t.a, leaf(3), o)
    o.t.add_(1)
    with pytest.raises(actckpt.errors.InputChangedError, match=r"Argument 1\.t,"):
        y.sum().backward()


@pytest.mark.parametrize("program", OBJECT_PROGRAMS)
def test_a_tensor_of_an_object_that_was_changed_in_place_raises_where_it_is_read(program: str) -> None:
    o = Holder(t=torch.ones(3), other=torch.ones(3))
    y = ours(OBJECT_PROGRAMS[program], leaf(3), o)
    o.t.add_(1)
    with pytest.raises(actckpt.CheckpointError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_tensor_of_an_object_that_was_changed_and_is_not_read_does_no_harm() -> None:
    o = Holder(t=torch.ones(3), other=torch.ones(3))
    x = leaf(3)
    y = ours(OBJECT_PROGRAMS["not saved"], x, o)
    o.other.add_(1)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() + 1).exp())


def test_a_buffer_of_an_object_that_the_function_fills_anew_does_no_harm() -> None:
    def region(x: torch.Tensor, o: Holder) -> torch.Tensor:
        with torch.no_grad():
            o.t.copy_(x.detach() * 2)
        return (x + o.t).exp()

    x = leaf(3)
    ours(region, x, Holder(t=torch.ones(3))).sum().backward()
    assert_equal(x.grad, (x.detach() + x.detach() * 2).exp())


def test_a_tensor_of_an_object_that_the_function_reads_and_changes_raises() -> None:
    def region(x: torch.Tensor, o: Holder) -> torch.Tensor:
        with torch.no_grad():
            o.t.mul_(0.5).add_(x.detach())
        return (x + o.t).exp()

    y = ours(region, leaf(3), Holder(t=torch.ones(3)))
    with pytest.raises(actckpt.errors.InputChangedError, match=r"(?s)Argument 1\.t.*version 4.*version 0.*buffer"):
        y.sum().backward()


def test_a_read_of_a_changed_tensor_that_the_function_catches_raises_in_the_end() -> None:
    def region(x: torch.Tensor, o: Holder) -> torch.Tensor:
        try:
            x = x + o.t
        except Exception:
            x = x + 0.0
        return x.exp()

    o = Holder(t=torch.ones(3))
    y = ours(region, leaf(3), o, early_stop=False)
    o.t.add_(1)
    with pytest.raises(actckpt.errors.InputChangedError):
        y.sum().backward()


def test_the_check_of_reads_can_be_switched_off() -> None:
    o = Holder(t=torch.ones(3))
    x = leaf(3)
    y = ours(OBJECT_PROGRAMS["not saved"], x, o, determinism_check="none")
    o.t.add_(0)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() + 1).exp())


@pytest.mark.parametrize("kind", ["first linear", "bias", "autocast"])
def test_parameter_that_no_operator_saves_changed_before_backward_raises_or_is_right(kind: str) -> None:
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.bias).exp()

    def run(method: Any) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = Shift() if kind == "bias" else torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
        x = torch.randn(2, 3, requires_grad=kind != "first linear")
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            y = method(model, x)
        parameter = next(model.parameters())
        with torch.no_grad():
            parameter.mul_(-1)
        y.float().sum().backward()
        return parameter.grad if kind == "first linear" else x.grad

    try:
        actual = run(ours)
    except actckpt.CheckpointError:
        return
    assert_equal(actual, run(plain))


def test_keyword_tensor_of_a_nested_region_changed_in_place_raises_or_is_right() -> None:
    class Config:
        mask = torch.tensor([1.0, 2.0, 3.0])

    def inner(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).exp()

    def run(method: Any, *, change: bool) -> torch.Tensor | None:
        config = Config()
        config.mask = config.mask.clone()
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        y = method(lambda x: method(inner, x, mask=config.mask).sin(), x)
        if change:
            config.mask.add_(1)
        y.sum().backward()
        return x.grad

    try:
        actual = run(ours, change=True)
    except actckpt.CheckpointError:
        return
    assert_equal(actual, run(plain, change=False))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_a_scripted_module_that_changes_before_backward_raises(name: str) -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    for _ in range(3):  # its first runs, which are profiled, save other tensors
        scripted(leaf(3, 4)).sum().backward()
    same, changed = (ours(scripted, leaf(3, 4)) for _ in range(2))
    same.sum().backward()
    with torch.no_grad():
        dict(scripted.named_parameters())[f"0.{name}"].add_(1.0)
    with pytest.raises(actckpt.errors.RerunMismatchError, match="parameter"):
        changed.sum().backward()
