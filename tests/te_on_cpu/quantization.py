"""FP8 casts and updates of scales, as the kernels of transformer_engine_torch make them.

Delayed scaling casts with the scale that the quantizer holds and notes the largest absolute value; current scaling
casts with a scale from the tensor itself. Transposed copies are made where the quantizer wants columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_E4M3, _E5M2 = 7, 8
_TORCH = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    _E4M3: torch.float8_e4m3fn,
    _E5M2: torch.float8_e5m2,
}
_LARGEST = {_E4M3: 448.0, _E5M2: 57344.0}


def to_torch(dtype: Any) -> torch.dtype:
    """Return the dtype that a kernel is told to make."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[int(dtype)]


def written(into: Tensor, value: Tensor) -> Tensor:
    """Write as a kernel does, of which the version counter of `into` knows nothing."""
    into.data.copy_(value)
    return into


def is_quantized(value: Any) -> bool:
    """Whether this is a quantized tensor, or a storage of one."""
    return hasattr(value, "prepare_for_saving")


def plain(value: Any) -> Tensor:
    """Return a tensor in high precision, below autograd."""
    return dequantize(value, torch.float32) if is_quantized(value) else value.detach()


def _transposed(data: Tensor) -> Tensor:
    """Return the columns of a tensor as rows."""
    return data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])


def _scale(x: Tensor, quantizer: Any) -> Tensor:
    """Return what a tensor is multiplied by; note its largest value where scaling is delayed."""
    amax = x.abs().max().float() if x.numel() else torch.zeros(())
    if not hasattr(quantizer, "amax_epsilon"):
        written(quantizer.amax, torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        scale: Tensor = quantizer.scale
        return scale.reshape(1)
    scale = _LARGEST[int(quantizer.dtype)] / amax.clamp_min(max(quantizer.amax_epsilon, 1e-30))
    if quantizer.force_pow_2_scales:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return torch.where(amax > 0, scale, torch.ones_like(scale)).reshape(1)


def quantize(x: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor, into `output` if there is one."""
    if noop is not None and noop.item() != 0:
        return output
    x = plain(x)
    if quantizer is None:
        return x if output is None else written(output, x)
    scale = _scale(x, quantizer)
    largest = _LARGEST[int(quantizer.dtype)]
    data = (x.float() * scale).clamp(-largest, largest).to(_TORCH[int(quantizer.dtype)]).view(torch.uint8).contiguous()
    if output is None:
        return _made(quantizer, x, data, scale.reciprocal())
    if output._data is not None:
        written(output._data, data)
    if output._transpose is not None:
        written(output._transpose, _transposed(data))
        output._transpose_invalid = False
    written(output._scale_inv, scale.reciprocal())
    return output


def _made(quantizer: Any, like: Tensor, data: Tensor, scale_inv: Tensor) -> Any:
    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": _transposed(data) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    if not quantizer.internal:
        return tensors.Float8Tensor(shape=tuple(like.shape), dtype=like.dtype, **parts)
    return tensors.Float8TensorStorage(fake_dtype=like.dtype, **parts)


def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    """Return a quantized tensor to be written."""
    like = torch.zeros(shape, dtype=dtype)
    return _made(quantizer, like, torch.zeros(like.shape, dtype=torch.uint8), torch.zeros(1))


def dequantize(x: Any, dtype: Any) -> Tensor:
    """Cast back, from the columns where there are no rows."""
    data = x._data if x._data is not None else x._transpose
    values = data.view(_TORCH[int(x._fp8_dtype)]).float() * x._scale_inv
    return (values if x._data is not None else values.movedim(0, -1).contiguous()).to(to_torch(dtype))


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Transpose FP8 bytes."""
    return _transposed(data) if out is None else written(out, _transposed(data))


def finished(result: Tensor, dtype: torch.dtype, quantizer: Any, out: Any = None) -> Any:
    """Return what a kernel computed in single precision in the form that its caller wants."""
    result = result.to(dtype)
    if quantizer is not None:
        return quantize(result, quantizer, out if is_quantized(out) else None)
    return result if out is None else written(out, result)


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of a bias, and the cast of the gradient that it is the sum of."""
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def split_quantize(x: Tensor, splits: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """Cast the parts of a tensor, each with a quantizer of its own."""
    return [quantize(part, one) for part, one in zip(torch.split(x, list(splits)), quantizers, strict=True)]


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: int
) -> None:
    """Move histories on by one entry and compute scales from them.

    Row 0 collects the values of the step; it moves to the end and is emptied. A scale is left alone where nothing was
    seen.
    """
    parts = amaxes.split([history.shape[1] for history in histories])
    for amax, history, scale in zip(parts, histories, scales, strict=True):
        latest = torch.where(amax != 0, amax, history[0])
        moved = torch.cat([history[1:], latest[None]])
        largest = moved.max(0).values if algorithm == "max" else latest
        wanted = _LARGEST[int(dtype)] / largest / 2**margin
        written(scale, torch.where((largest > 0) & torch.isfinite(wanted), wanted, scale))
        moved[0] = 0
        written(history, moved)
