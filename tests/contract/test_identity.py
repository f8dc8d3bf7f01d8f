"""Saved tensors that need no grad come back as the very objects, or as aliases with their Python attributes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import oracle
import pytest
import torch
from internals.stores import flush
from offload_oracle import TwoTensor, two_tensor
from oracle import assert_equal, in_offload, in_region, leaf, no_collector, plain, theirs

import actckpt

aten = torch.ops.aten


class Saves(oracle.Saves):
    """Saves a tensor and remembers what it gets back."""

    found: list[Any] = []  # noqa: RUF012 - cleared by each test

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Saves.found.append(ctx.saved_tensors[0])
        return grad * 3, None


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    Saves.found.clear()
    yield
    Saves.found.clear()


def _offloaded(**options: Any) -> Callable[..., Any]:
    def method(*args: Any) -> Any:
        y = in_offload(**options)(*args)
        flush()
        return y

    return method


#: What keeps the bytes of an input where they are.
STAYING: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "torch": theirs,
    "rerun": actckpt.checkpoint,
    "recompute": in_region("recompute"),
    "keep": in_region("keep"),
    "list": in_region([aten.mul]),
    "function": in_region(lambda info: "keep" if info.is_input else "recompute"),
    "offload": _offloaded(min_bytes=1 << 20),
    "offload policy": in_region("offload"),
}
#: Those that do not hand out what autograd itself holds.
GUARDED = [name for name in STAYING if name not in ("plain", "torch", "rerun", "keep")]
MOVING: dict[str, Callable[..., Any]] = {
    "offload": _offloaded(),
    "function": in_region(lambda info: "offload"),
}


class Named(torch.Tensor):
    """Does nothing."""


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "a tensor": lambda: torch.randn(4, 6),
    "a mask": lambda: torch.randn(4, 6) > 0,
    "a view": lambda: torch.randn(8, 6)[2:6],
    "a transposed view": lambda: torch.randn(6, 4).t(),
    "an expanded view": lambda: torch.randn(6).expand(4, 6),
    "a conjugated view": lambda: torch.randn(4, 6, dtype=torch.complex64).conj(),
    "a detached output": lambda: leaf(4, 6).sin().detach(),
    "a frozen parameter": lambda: torch.nn.Parameter(torch.randn(4, 6), requires_grad=False),
    "a sparse tensor": lambda: torch.eye(4, 6).to_sparse(),
    "a subclass": lambda: torch.randn(4, 6).as_subclass(Named),
    "a wrapper": lambda: two_tensor(4, 6),
    "a wrapper of wrappers": lambda: TwoTensor(two_tensor(4, 6), two_tensor(4, 6)),
}


def _saving(method: Callable[..., Any], saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a leaf, and what a method made of it and saved a tensor for, which it does not hold itself."""
    x = leaf(4, 6)
    return x, method(lambda x, saved=saved: Saves.apply(x.sin(), saved).exp(), x).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STAYING)
def test_a_tensor_that_stayed_comes_back_as_the_very_object(name: str, kind: str) -> None:
    saved = KINDS[kind]()
    saved.tag = "kept"  # type: ignore[attr-defined]
    x, y = _saving(STAYING[name], saved)
    num_backwards = 1 if name == "torch" else 2
    for _ in range(num_backwards):
        torch.autograd.grad(y, x, retain_graph=name != "torch")
    assert [found is saved for found in Saves.found] == [True] * num_backwards


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "parameter" not in kind and "sparse" not in kind])
@pytest.mark.parametrize("name", MOVING)
def test_a_tensor_that_moved_comes_back_with_its_attributes(name: str, kind: str, lives: bool) -> None:
    def program(method: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        saved = KINDS[kind]()
        saved.tag, saved.scale = "moved", torch.ones(2)  # type: ignore[attr-defined]
        x, y = _saving(method, saved)
        if lives:
            saved.tag = "changed later"  # type: ignore[attr-defined]
        else:
            del saved
        return torch.autograd.grad(y, x), Saves.found[-1].tag, Saves.found[-1].scale

    assert_equal(program(MOVING[name]), program(plain))


@pytest.mark.parametrize("name", [*STAYING, *MOVING])
def test_an_intermediate_with_attributes_comes_back_with_them_and_its_bytes_are_not_kept_alive(name: str) -> None:
    storages = []

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach() > 0).float()
        mask.tag = "made here"  # type: ignore[attr-defined]
        storages.append(weakref.ref(mask.untyped_storage()))
        return Saves.apply(x.sin(), mask).exp()

    x = leaf(64, 64)
    y = {**STAYING, **MOVING}[name](function, x * 1)
    assert name != "recompute" or storages[0]() is None
    torch.autograd.grad(y.sum(), x)
    assert Saves.found[-1].tag == "made here"


@pytest.mark.parametrize("name", GUARDED)
def test_a_tensor_whose_bytes_were_replaced_comes_back_as_it_was_saved_and_one_that_changed_raises(name: str) -> None:
    saved = torch.randn(4, 6)
    before = saved.clone()
    x, y = _saving(STAYING[name], saved)
    saved.data = torch.zeros(4, 6)
    torch.autograd.grad(y, x)
    assert_equal(Saves.found[-1], before)
    x, y = _saving(STAYING[name], saved)
    saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("name", ["recompute", "list", "function", "offload", "offload policy"])
def test_neither_the_object_nor_the_graph_that_its_attributes_lead_to_is_kept_alive(name: str) -> None:
    with no_collector():
        for leads_to_graph in (False, True):
            saved, probe = torch.randn(4, 6), torch.nn.Module()
            saved.tag = "saved"  # type: ignore[attr-defined]
            x, y = _saving(STAYING[name], saved)
            held, held_probe = weakref.ref(saved), weakref.ref(probe)
            if leads_to_graph:
                saved.output, saved.probe = y, probe  # type: ignore[attr-defined]
                del saved, y, probe
                assert held_probe() is None
            else:
                del saved
                assert held() is None
                torch.autograd.grad(y, x)
                assert Saves.found[-1].tag == "saved"


@pytest.mark.parametrize("name", GUARDED)  # with others the very object is emptied, as without checkpoints
def test_what_a_module_of_transformer_engine_saved_is_emptied_for_nobody_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Empties(Saves):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            result = grad * saved
            saved.data = torch.empty(0)
            return result, None

    class Layer(torch.nn.Module):
        __module__ = "transformer_engine.pytorch"

        def forward(self, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
            return Empties.apply(x.sin(), saved).exp()  # type: ignore[no-any-return]

    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    layer, saved, x = Layer(), torch.randn(4, 8), leaf(4, 8)
    before = saved.clone()
    y = STAYING[name](layer, x, saved)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_equal(saved, before)
    assert_equal(torch.autograd.grad(y.sum(), x), first)
