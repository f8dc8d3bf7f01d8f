"""Plans for a memory model: its cost table with links, the bytes that the user asks for, and the solver."""

from __future__ import annotations

import dataclasses
import functools

import torch

from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.infeasible import with_reserve
from actckpt._budget.links import is_linked, with_links
from actckpt._budget.offloading import solved
from actckpt._budget.planned_model import facts_of
from actckpt._budget.running import device_of
from actckpt._budget.simple import plain_plan
from actckpt._cycles.cycle_model import CycleModel
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["Solving", "forwards_text", "smallest_budget"]


class Solving:
    """Solves for plans of one model under a budget."""

    def __init__(self, module: torch.nn.Module, config: BudgetConfig) -> None:
        self._module, self._config = module, config

    def costs(self, model: CycleModel, static_bytes: float) -> CostTable:
        """Return the cost table of a memory model, with the links over which values can be offloaded."""
        costs, device = model.costs(static_bytes), device_of(self._module)
        return with_links(costs, device) if is_linked(device, self._config.pins) else costs

    def budget_bytes(self, model: CycleModel, costs: CostTable) -> float:
        """Return the budget of the user in bytes."""
        return self._config.budget_bytes(self._module, functools.partial(model.plain_bytes, costs))

    def plan(self, model: CycleModel, costs: CostTable, budget_bytes: float, limit_bytes: float | None = None) -> Plan:
        """Return the fastest plan that fits.

        Args:
            limit_bytes: what it must fit into; None: the budget.
        Raises:
            PlanInfeasibleError: no plan fits.
        """
        plan = solved(costs, budget_bytes if limit_bytes is None else limit_bytes, self._config.pins)
        return self.placed(model, dataclasses.replace(plan, budget_bytes=budget_bytes))

    def placed(self, model: CycleModel, plan: Plan) -> Plan:
        """Return a plan that knows where its values are in the model."""
        names = tuple(call.block for call in model.calls)
        return dataclasses.replace(plan, blocks=names, places=model.places, model=facts_of(self._module, names))

    def least_bytes(self, model: CycleModel, static_bytes: float) -> float:
        """Return the smallest budget that can be met where it exceeds the user's budget, else 0."""
        costs = self.costs(model, static_bytes)
        try:
            solved(costs, self.budget_bytes(model, costs), self._config.pins)
        except PlanInfeasibleError as error:
            return 0.0 if error.smallest_bytes is None else smallest_budget(costs, error.smallest_bytes, static_bytes)
        return 0.0


def smallest_budget(costs: CostTable, least_bytes: float, static_bytes: float) -> float:
    """Return the smallest budget to name to a user: what the smallest plan needs, with a reserve."""
    return min(with_reserve(least_bytes, static_bytes), plain_plan(costs).peak_bytes)


def forwards_text(num_forwards: int) -> str:
    """Say that several forwards are part of a step; empty for one."""
    return f"{num_forwards} forwards of the model are part of the step before backward has ended" * (num_forwards > 1)
