"""The optimizers that train a model, as callers pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText

__all__ = ["Optimizers", "optimizers_of", "trained_by", "trains"]

#: One optimizer, several (for example one for matrices and one for the rest), or none.
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


_TRAINS_NOTHING = WarningText(
    "{function}: optimizer {optimizers} trains no parameter of this {model}.",
    "Pass the one that does, made after the model was moved or wrapped. If it trains copies of the parameters, ignore "
    "this.",
)


def optimizers_of(passed: Optimizers, model: torch.nn.Module, what: str) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers as a tuple, unwrapped from wrappers such as accelerate's.

    Warns if none of them trains a parameter of the model: they may train copies.

    Args:
        given: one, several in a sequence, or None.
        what: the function they were passed to, for messages.
    Raises:
        TypeError: one is no optimizer.
    """
    if passed is None:
        return ()
    optimizers = tuple(
        _unwrapped(optimizer, what) for optimizer in (passed if isinstance(passed, (list, tuple)) else (passed,))
    )
    if optimizers and not any(trains(optimizer, model) for optimizer in optimizers):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        warn_user(_TRAINS_NOTHING, function=what, optimizers=names, model=type(model).__name__)
    return optimizers


def _unwrapped(passed: Any, what: str) -> torch.optim.Optimizer:
    inner = getattr(passed, "optimizer", None)
    optimizer: Any = inner if hasattr(passed, "param_groups") and isinstance(inner, torch.optim.Optimizer) else passed
    if isinstance(optimizer, type) or not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        kind = f"the class {passed.__name__}" if isinstance(passed, type) else f"a {type(passed).__name__}"
        raise TypeError(
            f"{what}: optimizer is {kind}. Pass the torch.optim.Optimizer that trains the model, or several in a "
            "list; leave it out where there is none yet."
        )
    unwrapped: torch.optim.Optimizer = optimizer
    return unwrapped


def trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Whether an optimizer trains any parameter of a model, not copies of them."""
    trained = trained_by((optimizer,))
    return any(id(parameter) in trained for parameter in model.parameters())


def trained_by(optimizers: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters that optimizers train."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
