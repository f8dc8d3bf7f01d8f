"""The optimizers that train a model, as callers pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from actckpt._core.sites import warn_user

__all__ = ["Optimizers", "optimizers_of", "trained_by", "trains"]

#: One optimizer, several (for example one for matrices and one for the rest), or none.
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def optimizers_of(given: Optimizers, model: torch.nn.Module, what: str) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers as a tuple, unwrapped from wrappers such as accelerate's.

    Warns if none of them trains a parameter of the model: they may train copies.

    Args:
        given: one, several in a sequence, or None.
        what: the function they were passed to, for messages.
    Raises:
        TypeError: one is no optimizer.
    """
    if given is None:
        return ()
    found = tuple(_unwrapped(each, what) for each in (given if isinstance(given, (list, tuple)) else (given,)))
    if found and not any(trains(each, model) for each in found):
        names = ", ".join(type(each).__name__ for each in found)
        warn_user(
            f"{what}: optimizer {names} trains no parameter of this {type(model).__name__}. Pass the one that does "
            "(made after the model was moved or wrapped); if it trains copies of the parameters, all is well."
        )
    return found


def _unwrapped(given: Any, what: str) -> torch.optim.Optimizer:
    inner = getattr(given, "optimizer", None)
    optimizer: Any = inner if hasattr(given, "param_groups") and isinstance(inner, torch.optim.Optimizer) else given
    if isinstance(optimizer, type) or not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        kind = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(
            f"{what}: optimizer is {kind}. Pass the torch.optim.Optimizer that trains the model, or several in a "
            "list; leave it out where there is none yet."
        )
    found: torch.optim.Optimizer = optimizer
    return found


def trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Whether an optimizer trains any parameter of a model, not copies of them."""
    trained = trained_by((optimizer,))
    return any(id(parameter) in trained for parameter in model.parameters())


def trained_by(optimizers: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters that optimizers train."""
    return {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
