"""torch functions that are called directly instead of the overload that they dispatch to.

See NOTE [ Direct calls ] (csrc/record/callee.h). Each takes the overload's arguments by position. Operators that take
or return a list of tensors are excluded: these functions return a tuple instead.
"""

from collections.abc import Callable
from typing import Any

import torch

from actckpt._core import torch_private

__all__ = ["FUNCTIONS", "tensor_positions"]

#: Maximum number of arguments of a directly called operator.
_MAX_ARGUMENTS = 64

_METHODS = ("expand.default", "view.default")
_OTHERS = (
    *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "convolution.default"),
    *("_scaled_dot_product_flash_attention_for_cpu.default", "native_layer_norm.default", "_softmax.default"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Scalar", "clone.default"),
    *("cos.default", "exp.default", "neg.default", "relu.default", "rsqrt.default", "sigmoid.default"),
    *("sin.default", "tanh.default", "gelu.default", "silu.default"),
    *("permute.default", "select.int", "squeeze.dim", "t.default", "transpose.int", "unsqueeze.default"),
)


def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that this torch has, by overload name."""
    functions: dict[str, Callable[..., Any]] = {}
    for name in _OTHERS:
        base = name.partition(".")[0]
        owner = next((candidate for candidate in torch_private.builtin_functions if hasattr(candidate, base)), None)
        if owner is not None:
            functions[f"aten.{name}"] = getattr(owner, base)
    return functions | {f"aten.{name}": getattr(torch.Tensor, name.partition(".")[0]) for name in _METHODS}


#: By overload name.
FUNCTIONS = _functions()


def tensor_positions(schema: Any) -> int:
    """Return a bit mask of the arguments that are tensors."""
    arguments = schema.arguments[:_MAX_ARGUMENTS]
    return sum(1 << place for place, argument in enumerate(arguments) if "Tensor" in str(argument.type))
