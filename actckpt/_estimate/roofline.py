"""The time that a device would need for the operators of a step.

A kernel takes the longer of two times: its floating-point operations at the target's rate for the dtype, and the bytes
that it reads and writes at the target's memory bandwidth. It reaches the share of both peaks that large kernels reached
on an H200 (`_REACHED`); the rates of a CPU are used as they are. Launch costs are not included: small kernels take
longer.

Floating-point operations are those of matrix products, convolutions and attention, by the formulas of
`torch.utils.flop_counter`; causal attention has half of them. Other operators count their bytes. Views move nothing.
Lookups read as much of their first argument as they return.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import tensors_in
from actckpt._core.torch_private import settings as torch_settings
from actckpt._estimate.targets import Target

__all__ = ["Clock"]

_aten = torch.ops.aten

#: Operators without a formula, and those with the same one.
_SAME_FORMULA = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
#: The position of the causal flag among the arguments of attention: forward, backward.
_CAUSAL_AT = {
    _aten._scaled_dot_product_flash_attention_for_cpu: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
}
#: They read as much of their first argument as they return.
_LOOKUPS = frozenset({_aten.embedding, _aten.gather, _aten.index, _aten.index_select})
#: They overwrite their first argument without reading it.
_FILLS = frozenset({_aten.copy_, _aten.fill_, _aten.zero_, _aten.bernoulli_, _aten.normal_, _aten.uniform_})
#: They allocate or exchange memory, and write nothing.
_EMPTY = frozenset(
    {_aten.set_, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_QUERIES = "prim"


class _Shares(NamedTuple):
    """The shares of data sheet peaks that kernels reach."""

    products: float
    attention: float
    attention_backward: float
    bytes: float


#: From the times of all kernels of a step of eight blocks of a Llama (width 4096, 8192 tokens, bfloat16) on an H200
#: with torch 2.11: cuBLAS at 760e12 operations per second, cuDNN's attention at 585e12 forward and 449e12 backward, all
#: others at 2.9e12 bytes per second. An H100's time for that step is predicted within 3 % (docs/estimate-accuracy.md).
_REACHED = _Shares(products=0.77, attention=0.59, attention_backward=0.45, bytes=0.60)
_PEAK = _Shares(1.0, 1.0, 1.0, 1.0)


class Clock(ObservingMode):
    """Adds up the seconds of the operators inside the `with` block, including backward and recomputation."""

    supports_higher_order_operators = True

    def __init__(self, target: Target) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._shares = _PEAK if target.is_cpu else _REACHED
        #: For float32. If TF32 is allowed, devices run its matrix products at half of the 16-bit rate.
        self._float32_flops_per_s = target.float32_flops_per_s
        if not target.is_cpu and torch_settings.get_precision("cuda", "matmul") == "tf32":
            self._float32_flops_per_s = target.flops_per_s / 2
        self._formulas: dict[Any, Any] = FlopCounterMode(display=False).flop_registry
        #: Seconds of kernels.
        self.busy_seconds = 0.0
        #: Seconds in which the program waited for the link.
        self.stall_seconds = 0.0
        self.flops = 0
        #: Number of calls by operator name.
        self.calls: dict[str, int] = {}

    @property
    def seconds(self) -> float:
        """The current time of the program."""
        return self.busy_seconds + self.stall_seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", _QUERIES) != _QUERIES:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        packet = func.overloadpacket
        self.calls[str(packet)] = self.calls.get(str(packet), 0) + 1
        inputs, made = list(tensors_in((args, tuple(kwargs.values())))), list(tensors_in(result))
        if packet in _EMPTY or _is_view(func, inputs, made):
            return
        flops = self._flops(packet, args, kwargs, result)
        dtype = next((tensor.dtype for tensor in (*made, *inputs) if tensor.is_floating_point()), torch.float32)
        rate = self._target.flops_per_s if dtype.itemsize <= 2 else self._float32_flops_per_s
        rate *= self._share(str(packet))
        # `_foreach_` ones return nothing.
        written = made or list(tensors_in(args[:1] if func._schema.is_mutable else ()))
        moved = _moved_bytes(packet, inputs, written)
        self.flops += flops
        self.busy_seconds += max(flops / rate, moved / (self._target.memory_bytes_per_s * self._shares.bytes))

    def _share(self, name: str) -> float:
        if "_scaled_dot_product" not in name:
            return self._shares.products
        return self._shares.attention_backward if "backward" in name else self._shares.attention

    def _flops(self, packet: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        formula = self._formulas.get(_SAME_FORMULA.get(packet, packet))
        if formula is None:
            return 0
        at = _CAUSAL_AT.get(packet)
        arguments = args if at is None else _with_all_heads(args, query_at=int("backward" in str(packet)))
        flops = int(formula(*arguments, **kwargs, out_val=result))
        return flops // 2 if at is not None and len(args) > at and args[at] else flops

    def wait_until(self, seconds: float) -> None:
        """Wait for a copy."""
        self.stall_seconds += max(0.0, seconds - self.seconds)


def _with_all_heads(args: Any, query_at: int) -> list[Any]:
    """Return the arguments of attention with keys and values expanded to the heads of the queries.

    Grouped-query attention has fewer key heads; formulas of older versions of torch reject those (2.9).
    """
    expanded = list(args)
    num_heads = expanded[query_at].shape[1]
    for at in (query_at + 1, query_at + 2):
        batch, _, *rest = expanded[at].shape
        expanded[at] = torch.Size([batch, num_heads, *rest])
    return expanded


def _is_view(func: Any, inputs: list[Tensor], made: list[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    known = {id(tensor.untyped_storage()) for tensor in inputs}
    return bool(made) and all(id(tensor.untyped_storage()) in known for tensor in made)


def _moved_bytes(packet: Any, inputs: list[Tensor], written: list[Tensor]) -> int:
    nbytes = sum(map(_nbytes, written))
    if packet in _LOOKUPS:
        return 2 * nbytes + sum(map(_nbytes, inputs[1:]))
    return nbytes + sum(map(_nbytes, inputs[packet in _FILLS :]))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor; for an expanded one, those that it stores."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return tensor.dtype.itemsize * math.prod(sizes)
