"""Private names of torch for operators: what an overload calls, builtin functions, registered effects."""

import importlib
from collections.abc import Callable
from typing import Any

from actckpt._core.torch_private.lookup import lookup, optional

#: Builtin functions of torch, among them those that `torch.nn.functional` wraps. Missing: overloads are called.
builtin_functions: tuple[Any, ...] = tuple(
    found for path in ("torch._C._VariableFunctions", "torch._C._nn") if (found := optional(path)) is not None
)

_overload_type: Any = lookup("torch._ops.OpOverload")


def callee_of(overload: Any) -> Callable[..., Any]:
    """Return what an overload of an operator calls; of another operator, the operator."""
    is_overload = type(overload) is _overload_type
    callee: Callable[..., Any] = getattr(overload, "_op", overload) if is_overload else overload
    return callee


def has_registered_effect(overload: Any) -> bool:
    """Whether torch was told of an effect of an operator (`torch.library`), so that it must run once and in order."""
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = getattr(effects, "_get_effect", None)
    if effect_of is None:  # torch 2.9 has a dictionary; where there is neither, none can be registered that way
        effect_of = getattr(effects, "SIDE_EFFECTS", {}).get
    return effect_of(overload) is not None
