"""Products, norms, activations and softmax, as the kernels of transformer_engine_torch compute them: below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from te_on_cpu.quantization import bgrad_quantize, finished, plain, to_torch, written

__all__ = ["activations", "attention", "norms", "products"]

Kernel = Callable[..., Any]


def generic_gemm(*args: Any, extra_output: Any = None, alpha: float = 1.0, **_: Any) -> tuple[Any, Any, Any, Any]:
    """Multiply `op(b)` with `op(a)`: column-major, as cuBLAS has it. Return the product and what is fused with it."""
    a, transa, b, transb, out, quantizer, out_dtype, bias, _, gelu, gelu_in, grad, _, _, accumulate, _ = args
    a, b = plain(a), plain(b)
    dtype = to_torch(out_dtype) if out_dtype is not None else a.dtype if out is None else out.dtype
    leading = b.shape[:-1]
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    product = ((b.t() if transb else b) @ (a.t() if transa else a)) * alpha
    product = product if transb else product.view(*leading, product.shape[-1])
    bias_grad = gelu_input = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.detach().float()
    if gelu and grad:
        product = _pulled_back(_gelu, product, gelu_in.float())
    elif gelu:
        gelu_input = product.to(torch.bfloat16 if dtype.itemsize == 1 else dtype)
        product = _gelu(gelu_input.float())
    if accumulate:
        return written(out, out + product.to(out.dtype)), bias_grad, gelu_input, extra_output
    return finished(product, dtype, quantizer, out), bias_grad, gelu_input, extra_output


def te_general_grouped_gemm(*args: Any) -> Sequence[Tensor]:
    """Multiply pairs of matrices; return the biases, or their gradients."""
    a, transa, b, transb, out, _, splits, bias, _, single_output, _, grad, _, _, accumulate, _, _ = args
    targets = list(out[0].split(list(splits))) if single_output else out
    for one, other, target, addend in zip(a, b, targets, bias, strict=True):
        used = addend if addend.numel() else None
        product, bias_grad, *_ = generic_gemm(
            one, transa, other, transb, None, None, target.dtype, used, None, False, None, grad, None, 0, False, False
        )
        product = product.view_as(target)
        written(target, target + product if accumulate else product)
        if bias_grad is not None:
            written(addend, bias_grad)
    return bias


products: list[Kernel] = [generic_gemm, te_general_grouped_gemm]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.detach().float() + (1 if zero_centered else 0)


def layernorm_fwd(*args: Any) -> tuple[Any, Tensor, Tensor]:
    """Return the normed tensor, the mean, and the reciprocal deviation."""
    x, weight, bias, eps, out, quantizer, dtype, _, zero_centered = args
    x = x.detach().float()
    mean, rsigma = x.mean(-1), (x.var(-1, unbiased=False) + eps).rsqrt()
    normed = (x - mean[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered) + bias.detach().float()
    return finished(normed, to_torch(dtype), quantizer, out), mean, rsigma


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and the bias."""
    d, x = grad.detach().reshape(x.shape).float(), x.detach().float()
    normed = (x - mean[..., None]) * rsigma[..., None]
    g = d * _gamma(weight, zero_centered)
    inner = g - g.mean(-1, True) - normed * (g * normed).mean(-1, True)
    return (rsigma[..., None] * inner).to(grad.dtype), (d * normed).sum(0).to(weight.dtype), d.sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    """Return the normed tensor, nothing, and the reciprocal root of the mean square."""
    x = x.detach().float()
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    normed = x * rsigma[..., None] * _gamma(weight, zero_centered)
    return finished(normed, to_torch(dtype), quantizer, out), None, rsigma


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and the weight."""
    d, x = grad.detach().reshape(x.shape).float(), x.detach().float()
    normed = x * rsigma[..., None]
    g = d * _gamma(weight, zero_centered)
    dx = rsigma[..., None] * (g - normed * (g * normed).mean(-1, True))
    return dx.to(grad.dtype), (d * normed).sum(0).to(weight.dtype)


norms: list[Kernel] = [layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd]


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def _pulled_back(function: Callable[[Tensor], Tensor], grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a function's argument."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, grad)[0]


def _activation(function: Callable[[Tensor], Tensor]) -> tuple[Kernel, Kernel, Kernel]:
    """Return the kernels of an activation: forward, backward, and backward with the gradient of a bias."""

    def forward(x: Any, quantizer: Any) -> Any:
        return finished(function(plain(x).float()), x.dtype, quantizer)

    def backward(grad: Any, x: Any, quantizer: Any) -> Any:
        dtype, values = grad.dtype, plain(x).float()
        flat = plain(grad).float().reshape(function(values).shape)
        return finished(_pulled_back(function, flat, values), dtype, quantizer)

    def backward_with_bias(grad: Any, x: Any, quantizer: Any) -> Any:
        return bgrad_quantize(backward(grad, x, None), quantizer)

    return forward, backward, backward_with_bias


def activations() -> dict[str, Kernel]:
    """Return the kernels of the activations that tests use, by name."""
    found: dict[str, Kernel] = {}
    for name, function in {"gelu": _gelu, "swiglu": _swiglu}.items():
        found[name], found[f"d{name}"], found[f"dbias_d{name}"] = _activation(function)
    return found


def _softmax(x: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    scores = x.float() * scale
    return (scores if mask is None else scores.masked_fill(mask, -10000.0)).softmax(-1).to(x.dtype)


def _causal(x: Tensor, scale: float) -> Tensor:
    rows, columns = x.shape[-2:]
    return _softmax(x, scale, torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows))


def _softmax_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    d, values = grad.float(), y.float()
    return (scale * values * (d - (d * values).sum(-1, True))).to(grad.dtype)


def dropout_fwd(x: Tensor, p: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what is left of a tensor, and the mask as bytes (a real one has a bit per element)."""
    mask = torch.rand(x.shape) >= p
    result = plain(x) * mask / (1 - p)
    return result if out is None else written(out, result), mask.to(torch.uint8)


def dropout_bwd(grad: Tensor, mask: Tensor, p: float, out: Tensor | None = None) -> Tensor:
    """Return the gradient of dropout's input."""
    result = grad * mask / (1 - p)
    return result if out is None else written(out, result)


def attention() -> dict[str, Kernel]:
    """Return the kernels that unfused attention and te.ops.Dropout call, by name."""
    forwards = {
        "scaled": _softmax,
        "scaled_upper_triang_masked": _causal,
        "scaled_aligned_causal_masked": _causal,
    }
    found: dict[str, Kernel] = {f"{kind}_softmax_forward": forward for kind, forward in forwards.items()}
    found |= {f"{kind}_softmax_backward": _softmax_backward for kind in forwards}
    return {**found, "dropout_fwd": dropout_fwd, "dropout_bwd": dropout_bwd}
