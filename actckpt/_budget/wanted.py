"""What was asked of `apply` with a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from actckpt._budget.infeasible import OnInfeasible, check_on_infeasible
from actckpt._budget.running import device_of
from actckpt._budget.sizes import activation_budget_bytes, budget_bytes
from actckpt.action import Action
from actckpt.planner.pins import checked_pins

__all__ = ["Wanted", "check_wanted"]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked of `apply`."""

    budget: float | str | None
    activation_budget: float | str | None
    optimizers: tuple[torch.optim.Optimizer, ...]
    pins: Mapping[Any, Action | str] | None
    race: bool
    on_infeasible: OnInfeasible = "warn"

    @property
    def is_what_is_free(self) -> bool:
        """Whether the budget follows what memory is free."""
        return isinstance(self.budget, str) and self.budget.strip() == "auto"

    @property
    def text(self) -> str:
        """The budget as it was written, with its keyword."""
        if self.activation_budget is not None:
            is_share = isinstance(self.activation_budget, int) and 1 < self.activation_budget <= 100
            hint = f", which is bytes; a share is '{self.activation_budget}%'" if is_share else ""
            return f"activation_budget={self.activation_budget!r}{hint}"
        return f"budget={self.budget!r}"


def check_wanted(options: Mapping[str, Any], model: torch.nn.Module, what: str) -> None:
    """Raise a ValueError where a budget or another option is none, or not one of the two budgets is given."""
    budget, activation_budget = options.get("budget"), options.get("activation_budget")
    if (budget is None) == (activation_budget is None):
        given = "neither" if budget is None else "both"
        raise ValueError(f"{what}: {given} of budget and activation_budget given. Pass one of them.")
    if activation_budget is not None:
        activation_budget_bytes(activation_budget, plain_bytes=1.0)
    else:
        budget_bytes(budget, device_of(model), held_bytes=0.0)
    checked_pins(options.get("pins"))
    if not isinstance(race := options.get("race", True), bool):
        raise ValueError(f"{what}: race={race!r}. Pass True or False.")
    check_on_infeasible(options.get("on_infeasible", "warn"), what)
