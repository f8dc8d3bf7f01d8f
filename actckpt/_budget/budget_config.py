"""What was asked of `apply` with a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from actckpt._budget.running import device_of
from actckpt._budget.sizes import activation_budget_bytes, budget_bytes
from actckpt._core import devices
from actckpt._core.storages import storages_of
from actckpt._offload import stores
from actckpt._text.sizes import format_bytes
from actckpt.action import Action
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.pins import checked_pins

__all__ = ["BudgetConfig", "check_budget"]


#: A module outside of blocks is named from this share of the smallest budget; so many are.
_LARGE, _MOST_NAMES = 0.05, 3


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """A budget and how it is met. Exactly one of the two budgets is given."""

    budget: float | str | None
    activation_budget: float | str | None
    optimizers: tuple[torch.optim.Optimizer, ...]
    pins: Mapping[Any, Action | str] | None
    #: Whether candidate plans are tried in training steps.
    race: bool
    on_infeasible: Literal["warn", "raise"] = "warn"

    @property
    def is_total(self) -> bool:
        """Whether all memory counts, and not activations alone."""
        return self.budget is not None

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

    def without_optimizers(self) -> BudgetConfig:
        """Return it for a copy of the model, which has optimizers of its own."""
        return dataclasses.replace(self, optimizers=())

    def static(self, model: torch.nn.Module, device: torch.device) -> tuple[int, list[torch.Tensor]]:
        """Return the bytes that count and exist before a cycle, and gradients, which count while they live.

        Of a budget of activations nothing counts that exists before.
        """
        if not self.is_total:
            return 0, []
        allocator = devices.counting(device)
        if allocator is not None:
            inflight_bytes = stores.inflight_bytes(device)  # first: asking releases what has passed
            return allocator.allocated_bytes(device) - inflight_bytes, []
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        held: list[object] = [*model.parameters(), *model.buffers()]
        for optimizer in self.optimizers:
            held += [list(state.values()) for state in optimizer.state.values() if isinstance(state, dict)]
        storages = {id(storage): storage for storage in storages_of(held)}
        return sum(each.nbytes() for each in storages.values() if each.device.type == device.type), gradients

    def budget_bytes(self, costs: CostTable, model: torch.nn.Module) -> float:
        """Return the budget in bytes, for a kind of cycle with this cost table."""
        if self.activation_budget is None:
            device = device_of(model)
            static_bytes, gradients = self.static(model, device)
            held_bytes = static_bytes + sum(storage.nbytes() for storage in storages_of(gradients))
            return budget_bytes(self.budget, device, held_bytes=held_bytes)
        from actckpt._budget.simple import plain_plan  # with the solver: half a second to import

        return activation_budget_bytes(self.activation_budget, plain_bytes=plain_plan(costs).peak_bytes)

    def explained(self, error: PlanInfeasibleError, held_outside_blocks: Mapping[str, int]) -> str:
        """Return the text of an error with the budget as it was written, and with modules that hold memory.

        Args:
            held_outside_blocks: bytes by the name of the module.
        """
        if error.smallest_bytes is None:
            return str(error)
        nbytes = math.ceil(error.smallest_bytes)
        return (
            f"No plan fits the budget ({self.text}): the smallest budget is {format_bytes(nbytes)} ({nbytes} bytes)."
            f"{_outside(held_outside_blocks, nbytes)} Pass that budget or a larger one, or make the batch smaller."
        )


def _outside(held: Mapping[str, int], nbytes: int) -> str:
    """Say which modules outside of blocks hold a large part of the smallest budget."""
    large = sorted((size, name) for name, size in held.items() if name and size >= _LARGE * nbytes)[-_MOST_NAMES:]
    if not large:
        return ""
    names = [name for _, name in reversed(large)]
    modules = ", ".join(f"{name} ({format_bytes(size)})" for size, name in reversed(large))
    return (
        f" {format_bytes(sum(size for size, _ in large))} of it are made outside of the blocks, by {modules}: add "
        f"{'it' if len(names) == 1 else 'them'} with blocks=[..., {', '.join(map(repr, names))}]."
    )


def check_budget(options: Mapping[str, Any], model: torch.nn.Module, what: str) -> None:
    """Raise a ValueError where an option of a budget has no meaning, or not exactly one of the two budgets is given."""
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
    if (on_infeasible := options.get("on_infeasible", "warn")) not in ("warn", "raise"):
        raise ValueError(f"{what}: on_infeasible={on_infeasible!r}. Pass 'warn' or 'raise'.")
