"""Private names of torch for operators: what an overload calls, builtin functions, registered effects."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from actckpt._core.torch_private.optional import optional

#: Builtin functions of torch, among them those that `torch.nn.functional` wraps.
builtin_functions: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn)


def callee_of(overload: Any) -> Callable[..., Any]:
    """Return what an overload of an operator calls; of another operator, the operator."""
    callee: Callable[..., Any] = overload._op if type(overload) is torch._ops.OpOverload else overload
    return callee


def has_registered_effect(overload: Any) -> bool:
    """Whether torch was told of an effect of an operator (`torch.library`), so that it must run once and in order."""
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = optional(effects, "_get_effect")
    if effect_of is None:  # torch 2.9 has a dictionary; where there is neither, none can be registered that way
        effect_of = getattr(effects, "SIDE_EFFECTS", {}).get
    return effect_of(overload) is not None
