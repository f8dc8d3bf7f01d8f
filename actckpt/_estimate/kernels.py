"""Replacements for target kernels that CPU tensors do not get.

They save the same bytes and allocate nearly the same: attention without its dropout replaces flash attention with it,
`native_dropout` (a mask of one byte per number) the fused dropout, and LayerNorm's kernel RMSNorm's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from actckpt.policies import PerOp

__all__ = ["MATH_ATTENTION", "STAND_INS", "as_autocast", "by_function", "policy_for_stand_ins"]

_attention, _dropout, _rms_norm = functional.scaled_dot_product_attention, functional.dropout, functional.rms_norm
_aten = torch.ops.aten

#: Runs if no fused kernel supports the arguments of attention.
MATH_ATTENTION = "aten._safe_softmax"

#: Functions that GPU autocast runs in float32, and CPU autocast does not: the common ones of
#: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32.
_FLOAT32_UNDER_AUTOCAST = frozenset(
    (
        *("layer_norm", "group_norm", "norm", "softmax", "log_softmax", "logsumexp", "cross_entropy", "nll_loss"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"),
        *("sum", "prod", "cumsum", "cumprod", "pow", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2"),
        *("log10", "softplus", "cosine_similarity", "dist", "cdist", "renorm", "cosh", "sinh", "tan"),
    )
)

#: Operators of the target, and those that run instead.
_STANDS_FOR = {
    "_scaled_dot_product_flash_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "_fused_rms_norm": "native_layer_norm",
}


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`scaled_dot_product_attention` without dropout, for which CPUs have no flash kernel."""
    if len(args) > 1:
        args = (args[0], 0.0, *args[2:])
    return _attention(query, key, value, *args, **{**kwargs, "dropout_p": 0.0} if len(args) < 2 else kwargs)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """`dropout` as GPUs run it."""
    if inplace or not training or not 0 < p < 1:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`rms_norm` as one kernel, which GPUs use if input and weight have the same dtype."""
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, normalized_shape, weight, eps)
    return torch.layer_norm(input, normalized_shape, weight, None, 1e-5 if eps is None else eps)


#: By their name in `torch.nn.functional`.
STAND_INS: dict[str, Any] = {
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "rms_norm": rms_norm,
}


def by_function() -> dict[Any, Any]:
    """Return the replacements by the functions that programs call."""
    return {_attention: attention, _dropout: dropout, _rms_norm: rms_norm, torch.rms_norm: rms_norm}


def as_autocast(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a function as GPU autocast would cast them, if autocast is on."""
    if not torch.is_autocast_enabled("cpu") or getattr(func, "__name__", "") not in _FLOAT32_UNDER_AUTOCAST:
        return args
    return tuple(
        argument.float() if isinstance(argument, Tensor) and _is_half(argument) else argument for argument in args
    )


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def policy_for_stand_ins(policy: Any) -> Any:
    """Return a policy by operators that names the replacements instead of the target's operators; others unchanged."""
    if isinstance(policy, (list, tuple)):
        return [*policy, *(replacement for op_kept in policy if (replacement := _stand_in(op_kept)) is not None)]
    if isinstance(policy, PerOp):
        more = {
            replacement: action for op, action in policy.actions.items() if (replacement := _stand_in(op)) is not None
        }
        return PerOp({**more, **policy.actions}, policy.default)
    return policy


def _stand_in(op: Any) -> Any:
    name = str(op).removeprefix("aten.").partition(".")[0]
    replacement = _STANDS_FOR.get(name)
    return None if replacement is None else getattr(_aten, replacement)
