"""Private names of torch for operators: the callable behind an overload, builtin functions, registered effects."""

import functools
import importlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from actckpt._core.torch_private.lookup import lookup, optional

#: Builtin functions of torch, including those that `torch.nn.functional` wraps. Missing: overloads are called.
builtin_functions: tuple[Any, ...] = tuple(
    found for path in ("torch._C._VariableFunctions", "torch._C._nn") if (found := optional(path)) is not None
)

_overload_type: Any = lookup("torch._ops.OpOverload")


def callee_of(overload: Any) -> Callable[..., Any]:
    """Return the callable behind an operator overload; for another operator, the operator."""
    is_overload = type(overload) is _overload_type
    callee: Callable[..., Any] = getattr(overload, "_op", overload) if is_overload else overload
    return callee


_keys_of: Callable[[Tensor], Any] = lookup("torch._C._dispatch_keys")
_keys_after: Callable[[Any], Any] = lookup("torch._C._dispatch_keyset_full_after")
_python_key: Any = lookup("torch._C.DispatchKey.Python")


def call_kernel(overload: Any, tensors: Iterable[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the kernel of an operator for some tensors. Modes see the operators inside of it, and not itself."""
    keys = [_keys_of(tensor) for tensor in tensors]
    below = functools.reduce(operator.or_, keys) & _keys_after(_python_key)
    return overload.redispatch(below, *args, **kwargs)


def is_custom(func: Any) -> bool:
    """Whether an operator is an overload that is not one of torch's own."""
    return type(func) is _overload_type and func.namespace not in ("aten", "prims", "prim")


def has_registered_effect(overload: Any) -> bool:
    """Whether an operator has a registered effect (`torch.library`), so that it must run once and in order."""
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = getattr(effects, "_get_effect", None)
    if effect_of is None:  # torch 2.9 has a dictionary; without either, no effect can be registered
        effect_of = getattr(effects, "SIDE_EFFECTS", {}).get
    return effect_of(overload) is not None
