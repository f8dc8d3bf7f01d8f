"""The budget options of `apply`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from actckpt._budget.running import device_of
from actckpt._budget.sizes import activation_budget_bytes, budget_bytes
from actckpt._core import devices, simulated
from actckpt._core.storages import gradient_of, storages_of, tensors_in
from actckpt._offload import stores
from actckpt._text.suggestions import did_you_mean
from actckpt.action import Action
from actckpt.planner.pins import checked_pins

__all__ = ["BudgetConfig", "OnInfeasible", "check_budget", "has_budget"]

OnInfeasible = Literal["warn", "raise"]


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """A memory budget and how to meet it. Exactly one of the two budgets is set."""

    budget: float | str | None
    activation_budget: float | str | None
    optimizers: tuple[torch.optim.Optimizer, ...]
    pins: Mapping[Any, Action | str] | None
    #: Whether candidate plans are tried in training steps.
    race: bool
    on_infeasible: OnInfeasible = "warn"
    #: Whether large modules outside of the blocks become blocks, too: not if the user named the blocks.
    adds_blocks: bool = False
    #: Returns additional bytes that count: those that the step of `plan` needs outside of the cycle.
    more_bytes: Callable[[], int] = int

    @classmethod
    def of(cls, options: Mapping[str, Any], optimizers: tuple[torch.optim.Optimizer, ...]) -> BudgetConfig:
        """Return the options of `plan`: no plan that fits is an error."""
        budgets = options.get("budget"), options.get("activation_budget")
        pins, race = options.get("pins"), options.get("race", True)
        return cls(*budgets, optimizers, pins, race, "raise", adds_blocks=options.get("blocks") is None and not pins)

    @property
    def is_total(self) -> bool:
        """Whether all memory counts, not only activations."""
        return self.budget is not None

    @property
    def is_what_is_free(self) -> bool:
        """Whether the budget follows the free memory."""
        return isinstance(self.budget, str) and self.budget.strip() == "auto"

    @property
    def text(self) -> str:
        """The budget as the user wrote it, with its keyword."""
        if self.activation_budget is not None:
            is_share = isinstance(self.activation_budget, int) and 1 < self.activation_budget <= 100
            hint = f", which is bytes; a share is '{self.activation_budget}%'" if is_share else ""
            return f"activation_budget={self.activation_budget!r}{hint}"
        return f"budget={self.budget!r}"

    def without_optimizers(self) -> BudgetConfig:
        """Return the options for a copy of the model, which has its own optimizers."""
        return dataclasses.replace(self, optimizers=())

    def static(self, model: torch.nn.Module, device: torch.device) -> tuple[int, list[torch.Tensor]]:
        """Return the bytes that exist before a cycle and count, and gradients, which count while they are alive.

        Memory from before a cycle does not count toward an activation budget, except `more_bytes`.
        """
        more_bytes = self.more_bytes()
        if not self.is_total:
            return more_bytes, []
        allocator = devices.counting(device)
        if allocator is not None:
            inflight_bytes = stores.inflight_bytes(device)  # first: the call releases finished copies
            return allocator.allocated_bytes(device) - inflight_bytes + more_bytes, []
        gradients = [gradient for each in model.parameters() if (gradient := gradient_of(each)) is not None]
        states = [
            list(each.values()) for one in self.optimizers for each in one.state.values() if isinstance(each, dict)
        ]
        held = [*model.parameters(), *model.buffers(), *states]
        return _bytes_on(device, held) + more_bytes, gradients

    def optimizer_states(self) -> list[torch.Tensor]:
        """Return the tensors of the optimizers' state."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [*tensors_in(states)]

    def budget_bytes(self, model: torch.nn.Module, plain_bytes: Callable[[], float]) -> float:
        """Return the budget in bytes, for a kind of cycle whose peak without actckpt is `plain_bytes`."""
        if self.activation_budget is None:
            device = device_of(model)
            static_bytes, gradients = self.static(model, device)
            held_bytes = static_bytes + sum(storage.nbytes() for storage in storages_of(gradients))
            return budget_bytes(self.budget, device, held_bytes=held_bytes)
        return activation_budget_bytes(self.activation_budget, plain_bytes=plain_bytes())


def _bytes_on(device: torch.device, held: list[object]) -> int:
    storages = {id(storage): storage for storage in storages_of(held)}
    kind = "meta" if simulated.is_simulated() else device.type
    return sum(each.nbytes() for each in storages.values() if each.device.type == kind)


def has_budget(options: Mapping[str, Any]) -> bool:
    """Whether keyword arguments of `apply` include a budget."""
    return options.get("budget") is not None or options.get("activation_budget") is not None


def check_budget(options: Mapping[str, Any], model: torch.nn.Module, what: str) -> None:
    """Raise a ValueError if an option does not apply to a budget, or if not exactly one of the two budgets is given."""
    budget, activation_budget = options.get("budget"), options.get("activation_budget")
    if (budget is None) == (activation_budget is None):
        which = "neither" if budget is None else "both"
        raise ValueError(f"{what}: {which} of budget and activation_budget given. Pass one of them.")
    if activation_budget is not None:
        activation_budget_bytes(activation_budget, plain_bytes=1.0)
    else:
        budget_bytes(budget, device_of(model), held_bytes=0.0)
    checked_pins(options.get("pins"))
    if not isinstance(race := options.get("race", True), bool):
        raise ValueError(f"{what}: race={race!r}. Pass True or False.")
    if (value := options.get("on_infeasible", "warn")) not in get_args(OnInfeasible):
        near = did_you_mean([str(value)], get_args(OnInfeasible), show=repr)
        raise ValueError(f"{what}: on_infeasible={value!r}. Pass 'warn' or 'raise'.{near}")
