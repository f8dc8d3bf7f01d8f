"""Tensors that a rerun needs as they were: changed in place, given other memory, swapped, in arguments and objects."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from input_routes import ROUTES
from oracle import Checkpoint, assert_equal, leaf, ours, plain
from torch.testing._internal.two_tensor import TwoTensor

import actckpt


def _swap(t: torch.Tensor) -> None:
    torch.utils.swap_tensors(t, torch.full_like(t, 9.0))


def _assign_data(t: torch.Tensor) -> None:
    t.data = torch.full((3,), 9.0)


def _multiplied(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return (x * held).exp()


INPUTS: dict[str, Any] = ROUTES | {
    "module": lambda ck, read, x, t: ck(Multiply(), x, t),
    "set": lambda ck, read, x, t: ck(lambda x, ts: read(x, next(iter(ts))), x, {t}),
    "buffer": lambda ck, read, x, t: ck(_holding(t), x),
}
del INPUTS["global of another function"]  # not checked for other memory


def _holding(t: torch.Tensor) -> torch.nn.Module:
    module = Scale()
    if isinstance(t, torch.nn.Parameter):
        module.register_parameter("t", t)
    else:
        module.register_buffer("t", t)
    return module


class Scale(torch.nn.Module):
    t: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.t).exp()


class Multiply(torch.nn.Module):
    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x * t).exp()


@pytest.mark.parametrize(
    ("change", "kind"),
    [(_assign_data, "constant"), (_assign_data, "leaf"), (_swap, "constant"), (_swap, "leaf"), (_swap, "parameter")],
)
@pytest.mark.parametrize("place", INPUTS)
def test_an_input_that_was_given_other_memory_raises_or_is_right(
    place: str, change: Callable[..., None], kind: str
) -> None:
    def run(checkpoint: Checkpoint, *, changes: bool) -> torch.Tensor | None:
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        t = torch.tensor([1.0, 2.0, 3.0], requires_grad=kind == "leaf")
        t = torch.nn.Parameter(t) if kind == "parameter" else t
        y = INPUTS[place](checkpoint, _multiplied, x, t)
        if changes:
            change(t)
        return torch.autograd.grad(y.sum(), x)[0]  # leaves the node alone that swap_tensors would make raise

    try:
        actual = run(ours, changes=True)
    except RuntimeError as error:
        assert re.search("other memory|another tensor|other bytes|Cannot swap", str(error))
    else:
        assert_equal(actual, run(plain, changes=False))


@pytest.mark.parametrize("kind", ["constant", "leaf", "parameter"])
def test_a_tensor_that_offload_leaves_where_it_is_cannot_be_swapped(kind: str) -> None:
    t = torch.tensor([1.0, 2.0, 3.0], requires_grad=kind == "leaf")
    t = torch.nn.Parameter(t) if kind == "parameter" else t
    with actckpt.offload():
        y = (torch.ones(3, requires_grad=True) * t).exp()
    with pytest.raises(RuntimeError, match="weakref"):
        _swap(t)
    y.sum().backward()


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
    def __init__(self, t: torch.Tensor) -> None:
        self.t, self.other = t, torch.ones(3)


def _fills(x: torch.Tensor, o: Holder) -> torch.Tensor:
    with torch.no_grad():
        o.t.copy_(x.detach() * 2)
    return (x + o.t).exp()


def _reads_and_changes(x: torch.Tensor, o: Holder) -> torch.Tensor:
    with torch.no_grad():
        o.t.mul_(0.5).add_(x.detach())
    return (x + o.t).exp()


def _catches(x: torch.Tensor, o: Holder) -> torch.Tensor:
    try:
        x = x + o.t
    except Exception:
        x = x + 0.0
    return x.exp()


def _read(x: torch.Tensor, o: Holder) -> torch.Tensor:
    return (x + o.t).exp()


def _viewed(x: torch.Tensor, o: Holder) -> torch.Tensor:
    return (x + o.t[:3]).exp()


def _ones() -> torch.Tensor:
    return torch.ones(3)


_PLAINLY = "modified by an inplace operation"
#: Function of a tensor and an object, the tensor that the object holds, which one changes, options, and the error.
OBJECTS: list[tuple[Callable[..., torch.Tensor], Callable[[], torch.Tensor], str, dict[str, Any], str]] = [
    (lambda x, o: (x * o.t).exp(), _ones, "t", {}, _PLAINLY),
    (_read, _ones, "t", {}, _PLAINLY),
    (_viewed, _ones, "t", {}, _PLAINLY),
    (_read, torch.inference_mode()(_ones), "t", {}, r"(?s)Argument 1\.t.*inference tensor"),
    (_viewed, torch.inference_mode()(_ones), "t", {}, r"(?s)Argument 1\.t.*inference tensor"),
    (lambda x, o: x.exp() + o.t.a, lambda: TwoTensor(_ones(), _ones()), "t", {}, r"Argument 1\.t,"),
    (_reads_and_changes, _ones, "", {}, r"(?s)Argument 1\.t.*version 4.*version 0.*buffer"),
    (_catches, _ones, "t", {"early_stop": False}, _PLAINLY),
    (_read, _ones, "other", {}, ""),
    (_fills, _ones, "", {}, ""),
]


@pytest.mark.parametrize(("function", "make", "changed", "options", "error"), OBJECTS, ids=range(len(OBJECTS)))
def test_tensors_of_an_object_are_checked_where_they_are_read(
    function: Any, make: Any, changed: str, options: dict[str, Any], error: str
) -> None:
    x, o = leaf(3), Holder(make())
    y = ours(function, x, o, **options).sum()
    expected = plain(function, x, Holder(make())).sum()
    with torch.inference_mode() if o.t.is_inference() else nullcontext():
        getattr(o, changed).add_(1) if changed else None
    if error:
        with pytest.raises(actckpt.CheckpointError, match=error):
            y.backward()
        return
    assert_equal(torch.autograd.grad(y, x), torch.autograd.grad(expected, x))


def test_the_check_of_reads_can_be_switched_off() -> None:
    x, o = leaf(3), Holder(torch.ones(3))
    y = ours(_read, x, o, determinism_check="none")
    o.t.add_(0)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() + 1).exp())


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
