"""Tensors that a rerun needs as they were: changed in place, given other memory, swapped, in arguments and objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from input_routes import METHODS, ROUTES
from oracle import Checkpoint, assert_equal, in_offload, in_region, leaf, ours, plain, theirs
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
    "forward of a module": lambda ck, read, x, t: ck(Multiply().forward, x, t),
    "set": lambda ck, read, x, t: ck(lambda x, ts: read(x, next(iter(ts))), x, {t}),
    "buffer": lambda ck, read, x, t: ck(_holding(t), x),
}
del INPUTS["global of another function"]  # not checked for other memory
#: What an error calls a tensor that came this way.
NAMED: dict[str, str] = {
    "module": "Argument 1",
    "forward of a module": "Argument 1",
    "keyword": "Keyword argument 'held'",
    "keyword list": "'items'.*0",
    "list": "Argument 1.*0",
    "tuple": "Argument 1.*1",
    "dict": "Argument 1.*held",
    "ordered dict": "Argument 1.*held",
    "default dict": "Argument 1.*held",
    "named tuple": "Argument 1.*1",
    "dataclass": "Argument 1.*held",
    "nested containers": "Argument 1.*a.*0.*1.*held",
    "deque": "Argument 1",
    "set": "Argument 1",
    "closure": "'held' in the closure",
    "closure of a closure": "'held' in the closure",
    "function argument": "'held' in the closure",
    "default": "defaults",
    "keyword-only default": "defaults",
    "partial": "arguments",
    "partial keyword": "keywords.*held",
    "method of a class": "'held' in the closure",
    "global": "Global variable 'GLOBAL'",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", NAMED)
def test_an_input_changed_in_place_after_forward_raises_and_is_named(route: str, method: str) -> None:
    def run(checkpoint: Checkpoint, *, is_view: bool, changes: bool = True) -> torch.Tensor:
        base, x = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        y = INPUTS[route](checkpoint, _multiplied, x, base[:] if is_view else base)
        if changes:
            base.add_(1)
        return torch.autograd.grad(y.sum(), x)[0]

    for is_view in (False, True):
        expected = run(plain, is_view=is_view, changes=False)
        if "module" not in route:
            assert not torch.equal(run(theirs, is_view=is_view), expected), "torch has learnt this: see differences.md"
        try:
            found = run(METHODS[method], is_view=is_view)
        except actckpt.errors.InputChangedError as error:
            name = rf"{NAMED[route]}|'(kw)?args' in the closure" if method == "nested" else NAMED[route]
            assert re.search(rf"(?s)({name}).*Version 0 in forward, 1 now", str(error))
        else:
            assert method == "inside hooks", "others hold no copies"
            assert_equal(found, expected)


@pytest.mark.parametrize("how", ["dropout", "other dtype"])
def test_an_input_that_changed_raises_where_reruns_restore_state(how: str) -> None:
    block, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)), torch.ones(2, 3)
    y = ours(block if how == "dropout" else block[0], x)
    x.add_(1)
    torch.set_default_dtype(torch.float64 if how == "other dtype" else torch.float32)
    try:
        with pytest.raises(actckpt.errors.InputChangedError, match=r"(?s)Argument 0.*Version 0 in forward, 1 now"):
            y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)


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


HOLDING: dict[str, Checkpoint] = {
    **{policy: in_region(policy) for policy in ("recompute", "keep", "offload")},
    "offload that leaves it": in_offload(min_bytes=1 << 20),
}


@pytest.mark.parametrize("method", HOLDING)
def test_memory_that_is_swapped_after_a_region_raises_at_once_or_is_right(method: str) -> None:
    x, t = torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    before = t.clone()
    y = HOLDING[method](_multiplied, x, t)
    try:
        _swap(t)
    except RuntimeError as error:
        # Plain autograd: "... gradient edge ..." of a constant, "Expected use_count ..." of others.
        assert "weakref" in str(error) or "gradient edge" in str(error)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() * before).exp() * before)


def test_memory_that_an_input_gets_back_does_no_harm() -> None:
    x, t = leaf(3), torch.ones(3)
    y = ours(lambda x, t: (x * t).exp(), x, t)
    before = t.data
    t.data = torch.zeros(3)
    t.data = before
    y.sum().backward()
    assert_equal(x.grad, x.detach().exp())


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


@pytest.mark.parametrize("is_module", [True, False])
def test_the_check_of_reads_can_be_switched_off(is_module: bool) -> None:
    x, holder = leaf(3), _holding(torch.ones(3))
    y = ours(holder if is_module else lambda x: (x * holder.t).exp(), x, determinism_check="none")
    holder.t.add_(0)
    y.sum().backward()
    assert_equal(x.grad, x.detach().exp())


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
