"""Regions inside saved-tensor hooks of the user: what the hooks see, and what becomes of what they give back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layout_programs import PROGRAMS as PROGRAMS_OF_LAYOUTS
from on_device import memory_of
from oracle import assert_equal, leaf, theirs
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import actckpt

aten = torch.ops.aten

Hooks = Callable[[], Any]


def _lossy() -> Any:
    """Keep what is saved in bfloat16."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.detach().to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor

    return saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))


def _contiguous() -> Any:
    """Forget strides."""
    return saved_tensors_hooks(lambda t: t.detach().clone(memory_format=torch.contiguous_format), lambda t: t)


def _identical() -> Any:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


#: Hooks that clone need strided tensors. A linear system that was rounded may have no solution, and products of some
#: sizes differ where a factor is no longer transposed.
_LEFT_OUT = ("sparse", "linear algebra", "several sizes")
PROGRAMS = {name: program for name, program in PROGRAMS_OF_LAYOUTS.items() if name not in _LEFT_OUT}


POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "list": [aten.mm, aten.sin],
    "function": lambda info: "keep" if info.nbytes < 100 else "recompute",
}


def _gradient(method: Callable[..., Any], program: str, hooks: Hooks) -> torch.Tensor:
    torch.manual_seed(3)
    x = leaf(8, 8)
    h = x * 1
    with hooks():
        y = method(PROGRAMS[program], h)
    return torch.autograd.grad(y, x)[0]


_numbers = itertools.count()


def _in_region(policy: Any) -> Callable[..., Any]:
    """Return a method whose region stands at a place of its own, that nobody has audited."""
    name = f"in_region_{next(_numbers)}"
    source = f"def {name}(function, *args):\n    with actckpt.region(policy):\n        return function(*args)"
    namespace: dict[str, Any] = {"actckpt": actckpt, "policy": policy}
    exec(source, namespace)
    method: Callable[..., Any] = namespace[name]
    return method


@pytest.mark.parametrize("hooks", [save_on_cpu, _identical, _contiguous], ids=["save_on_cpu", "same", "contiguous"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_inside_hooks_are_those_of_plain_autograd(program: str, policy: str, hooks: Hooks) -> None:
    expected = _gradient(lambda function, *args: function(*args), program, _identical)
    method = _in_region(POLICIES[policy])
    for _ in range(2):
        assert_equal(_gradient(method, program, hooks), expected)


#: They save fewer bytes than the input has: a region gives these to the hooks, and they round nothing else.
_ON_FEW_BYTES = ("scalars", "half precision")


@pytest.mark.parametrize("audit", ["first", "always"])
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in _ON_FEW_BYTES])
def test_gradients_inside_hooks_that_round_are_those_of_torchs_checkpoint(program: str, audit: Any) -> None:
    actckpt.configure(audit=audit)
    expected = _gradient(theirs, program, _lossy)
    method = _in_region("recompute")
    for _ in range(2):
        assert_equal(_gradient(method, program, _lossy), expected)
    assert_equal(_gradient(actckpt.checkpoint, program, _lossy), expected)


def test_an_audit_inside_hooks_that_give_back_the_same_bytes_still_finds_a_hidden_write() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        a = h * 2
        memory_of(a)[0, 0] = 7.0
        return a.sin().exp().sum()

    x = leaf(6, 6)
    with save_on_cpu(), actckpt.region():
        y = function(x * 1)
    with pytest.raises((actckpt.errors.AuditError, UserWarning), match="with other bytes than"):
        y.backward()


def _seen(method: Callable[..., Any], function: Callable[..., Any], *args: torch.Tensor) -> list[Any]:
    seen: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        method(function, *args)
    return seen


def test_hooks_see_the_shapes_that_autograd_saved_and_leaves_as_they_are() -> None:
    x, scale = leaf(6, 6), torch.randn(6, 6)
    seen = _seen(_in_region("recompute"), lambda x: (x * scale).exp() * x, x)
    expected = _seen(theirs, lambda x, scale: (x * scale).exp() * x, x, scale)
    assert {id(tensor) for tensor in seen} == {id(x), id(scale)}
    assert {id(tensor) for tensor in expected} >= {id(x), id(scale)}  # torch 2.9 hands out a tensor of its own, too


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda h: h.view(36).sin(), [(36,)]),
        (lambda h: h.t().sin() + h.sin(), [(6, 6)]),
        (lambda h: h.view(4, 9).sin() + h[0].sin().sum(), [(4, 9)]),
        (lambda h: h[0].sin() + h[1].cos(), [(6,), (6,)]),
        (lambda h: sum(part.sin() for part in h.chunk(3, dim=1)), [(6, 2)] * 3),
        (lambda h: (h[0] * 2).exp(), [(6,)]),  # what `exp` returned
        (lambda h: (h @ h.t()).view(36).sin().view(4, 9).sin(), [(6, 6), (36,)]),  # what `mm` returned, as it was saved
        (lambda h: torch.nn.Linear(6, 6)(h).exp(), [(6, 6), (6, 6)]),  # no parameters
    ],
)
def test_hooks_see_of_several_views_those_that_no_other_one_contains(function: Any, shapes: list[Any]) -> None:
    seen = _seen(_in_region([aten.exp, aten.mm]), function, leaf(6, 6) * 1)
    assert [tuple(tensor.shape) for tensor in seen] == shapes


def test_each_backward_unpacks_each_piece_once() -> None:
    counts = {"pack": 0, "unpack": 0}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counts["pack"] += 1
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        counts["unpack"] += 1
        return tensor

    x = leaf(6, 6)
    h = x * 1
    with saved_tensors_hooks(pack, unpack), actckpt.region():
        y = (h * h.sin()).sum() + (h * h.exp()).sum() + h[0].cos().sum()
    assert counts == {"pack": 1, "unpack": 0}
    for number in (1, 2):
        torch.autograd.grad(y, x, retain_graph=True)
        assert counts == {"pack": 1, "unpack": number}


def test_hooks_that_give_back_another_shape_are_named() -> None:
    x = leaf(6, 6)
    with saved_tensors_hooks(lambda t: t, lambda t: t.flatten()), actckpt.region():
        y = (x * 1).sin().sum()
    with pytest.raises(actckpt.errors.ActckptError, match=r"gave back a tensor of shape \(36,\).*of shape \(6, 6\)"):
        y.backward()


@pytest.mark.parametrize("kind", ["leaf", "output", "parameter", "frozen parameter"])
def test_a_region_in_a_checkpoint_hands_out_the_same_in_the_rerun(kind: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with actckpt.region():
            return (x * w).sin().exp() * w

    def program(method: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        x, w = leaf(6, 6), leaf(6, 6)
        given = {
            "leaf": w,
            "output": w * 1,
            "parameter": torch.nn.Parameter(w.detach()),
            "frozen parameter": torch.nn.Parameter(w.detach(), requires_grad=False),
        }[kind]
        y = method(function, x * 1, given)
        return torch.autograd.grad(y.sum(), [x, given] if given.requires_grad else [x])

    expected = program(lambda function, *args: function(*args))
    assert_equal(program(actckpt.checkpoint), expected)
    assert_equal(program(lambda function, *args: actckpt.checkpoint(actckpt.checkpoint, function, *args)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_around_meta_tensors_have_no_bytes_to_compare(policy: str) -> None:
    seen: list[tuple[int, ...]] = []
    h = torch.randn(6, 6, device="meta", requires_grad=True)
    for _ in range(2):
        hooks = saved_tensors_hooks(lambda t: (seen.append(tuple(t.shape)), t)[1], lambda t: t)
        with hooks, actckpt.region(POLICIES[policy]):
            out = (h @ h.T).sin().exp().sum()
        out.backward()
    assert set(seen) == {(6, 6)}
    assert h.grad is not None and h.grad.is_meta
