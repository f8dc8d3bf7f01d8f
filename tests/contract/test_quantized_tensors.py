"""Quantized tensors as those of TransformerEngine: changed in place, and emptied by the backward that reads them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from internals.stores import flush, store_of_kind
from oracle import Saves, SavingSquare, assert_equal, in_offload, in_region, leaf, plain

import actckpt


def _quantized(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to whole multiples of 1 / scale that fit a byte."""
    return (x.detach() * scale).round().clamp(-127, 127).to(torch.int8), 1 / scale


class Quantized(torch.Tensor):
    """Bytes and a scale as a wrapper subclass without `__tensor_flatten__`, as in TransformerEngine 2.9.

    As there, `detach` is a Python method: a new wrapper around the same inner tensors, with a version counter of its
    own.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, requires_grad: bool = False) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device, requires_grad=requires_grad
        )
        self._data, self._scale_inv = data, scale_inv
        return self

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor, requires_grad: bool = False) -> None:
        pass

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    def detach(self) -> Quantized:
        return type(self)(self._data, self._scale_inv)

    def clear(self) -> None:
        self._data.data = torch.empty(0)

    def value(self) -> torch.Tensor:
        return self._data.float() * self._scale_inv

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        if func in (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar):
            data, scale_inv = _quantized(args[0].value() * args[1], 100 / args[0].value().abs().max())
            args[0]._data.copy_(data)
            args[0]._scale_inv.copy_(scale_inv)
            return args[0]
        raise NotImplementedError(func)


class QuantizedPair(Quantized):
    """The same with `__tensor_flatten__`, as in TransformerEngine 2.20."""

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["_data", "_scale_inv"], self.requires_grad

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: bool, size: Any, stride: Any) -> QuantizedPair:
        return QuantizedPair(inner["_data"], inner["_scale_inv"], context)


def _clear(tensor: Any) -> None:
    """Empty a tensor for everybody who shares the object, as TransformerEngine does after its last use in backward."""
    tensor.clear() if hasattr(tensor, "clear") else setattr(tensor, "data", torch.empty(0))


class _Clears(Saves):
    """Saves a tensor, or a quantized one, and empties what it gets back."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (saved,) = ctx.saved_tensors
        value = saved.value() if isinstance(saved, QuantizedPair) else saved.clone()
        _clear(saved)
        return grad * value, None


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_emptying_what_was_unpacked_does_not_reach_the_store(kind: str, is_quantized: bool) -> None:
    x, data = leaf(4, 8), torch.randn(4, 8)
    expected = (data * 10).to(torch.int8).float() * 0.1 if is_quantized else data.clone()
    with store_of_kind(kind), actckpt.offload(min_bytes=0):
        pair = QuantizedPair((data * 10).to(torch.int8), torch.tensor(0.1))
        # Twice, as two operators save one input: neither must empty the other's.
        saved = pair if is_quantized else data * 1.0
        y = _Clears.apply(x, saved).sum() + _Clears.apply(x, saved).sum()
        del pair, saved
        flush()
        for _ in range(3):
            (grad,) = torch.autograd.grad(y, x, retain_graph=True)
            torch.testing.assert_close(grad, expected + expected, rtol=0, atol=0)


def test_emptying_does_not_reach_a_reruns_values() -> None:
    x, data = leaf(4, 8), torch.randn(4, 8)
    y = actckpt.checkpoint(lambda x: _Clears.apply(x, data * 1.0).exp(), x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert_equal(torch.autograd.grad(y, x), first)


def test_saved_tensors_are_unpacked_several_times_per_backward() -> None:
    class Twice(SavingSquare):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]

    for method in (actckpt.te.checkpoint, METHODS["offload"]):
        x = leaf(4, 8)
        method(lambda x: Twice.apply(x * 1.0), x).sum().backward()
        assert_equal(x.grad, x.detach() + x.detach())


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.value().T

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.value(), grad.T @ x


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, kind: type[Quantized]) -> Any:
        return kind(*_quantized(x, 50 / x.detach().abs().max()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


METHODS: dict[str, Any] = {
    "rerun": actckpt.checkpoint,
    "te.checkpoint": actckpt.te.checkpoint,
    "offload": in_offload(),
    "offloaded inputs": functools.partial(actckpt.checkpoint, offload_inputs=True),
    "recompute": in_region("recompute"),
    "list": in_region([torch.ops.aten.mm.default]),
    "offload policy": in_region("offload"),
    "region in offload": in_offload(in_region("recompute")),
    "rerun in offload": in_offload(actckpt.checkpoint),
    "rerun in rerun": lambda function, *args: actckpt.checkpoint(actckpt.checkpoint, function, *args),
}


def _weight(kind: type[Quantized]) -> torch.nn.Parameter:
    return torch.nn.Parameter(kind(*_quantized(torch.randn(8, 8), torch.tensor(40.0)), True))


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", METHODS)
def test_quantized_weights_that_an_optimizer_changed_are_saved(name: str, kind: type[Quantized]) -> None:
    def program(method: Any) -> Any:
        torch.manual_seed(3)
        weight, found = _weight(kind), []
        for _ in range(3):
            x = leaf(4, 8)
            method(lambda x: _QuantizedLinear.apply(x.sin(), weight).exp(), x).sum().backward()
            found += [x.grad, weight.grad.clone()]
            with torch.no_grad():
                weight.mul_(0.5)
        assert weight._version == 3
        return found

    assert_equal(program(METHODS[name]), program(plain))


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", METHODS)
def test_quantized_activations_that_were_changed_before_they_were_saved_come_back(
    name: str, kind: type[Quantized]
) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        quantized = _Quantize.apply(weight.sin(), kind)
        with torch.no_grad():
            quantized.mul_(0.5)
        return _QuantizedLinear.apply(x, quantized).exp()

    def program(method: Any) -> Any:
        torch.manual_seed(3)
        x, weight = leaf(4, 8), leaf(8, 8)
        return torch.autograd.grad(method(function, x * 1.0, weight * 1.0).sum(), [x, weight])

    assert_equal(program(METHODS[name]), program(plain))


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", ["offload", "recompute", "list", "offload policy"])
def test_quantized_weights_that_are_changed_after_they_were_saved_raise(name: str, kind: type[Quantized]) -> None:
    weight = _weight(kind)
    y = METHODS[name](lambda x: _QuantizedLinear.apply(x, weight), leaf(4, 8))
    with torch.no_grad():
        weight.mul_(0.5)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        y.sum().backward()
