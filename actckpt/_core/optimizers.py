"""The optimizers that train a model, as callers pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["Optimizers", "optimizers_of", "trained_by", "trains"]

#: One, several (of matrices and of the rest, say), or none.
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def optimizers_of(given: Optimizers, model: torch.nn.Module, what: str) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers as a tuple.

    Args:
        given: one, several in a sequence, or None.
        what: the function they were given to, for messages.
    Raises:
        TypeError: one is no optimizer.
        ValueError: one has no parameter of the model.
    """
    if given is None:
        return ()
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in found:
        if isinstance(each, type) or not (hasattr(each, "param_groups") and hasattr(each, "state")):
            kind = f"the class {each.__name__}" if isinstance(each, type) else f"{type(each).__name__} {each!r:.40}"
            raise TypeError(
                f"{what}: optimizer is {kind}. Pass the torch.optim.Optimizer that trains the model, or several in a "
                "list; leave it out where there is none yet."
            )
        if not trains(each, model):
            raise ValueError(
                f"{what}: optimizer {type(each).__name__} trains no parameter of this {type(model).__name__}. Pass the "
                "one that does (made after the model was moved or wrapped), or leave it out."
            )
    return found


def trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Whether an optimizer trains any parameter of a model. Those that train copies of the parameters do not."""
    trained = trained_by((optimizer,))
    return any(id(parameter) in trained for parameter in model.parameters())


def trained_by(optimizers: Sequence[Any]) -> set[int]:
    """Return the identities of the parameters that optimizers train."""
    return {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
