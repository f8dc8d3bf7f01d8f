"""Plans for a memory model: its cost table with links, the user's budget in bytes, and the solver."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection

import torch

from actckpt._blocks.outside import advice, smaller_blocks
from actckpt._budget.bandwidth import is_linked, pins_offload, with_links
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.offloading import solved
from actckpt._budget.planned_model import facts_of
from actckpt._budget.running import device_of
from actckpt._budget.simple import plain_plan
from actckpt._cycles.cycle_model import CycleModel
from actckpt._text.sizes import format_bytes
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["Solving"]

#: Reserve that errors add to the smallest budget, since cycles differ: a share without static memory, and bytes.
_RESERVE, _RESERVE_BYTES = 0.005, 4096


class Solving:
    """Solves for plans of one model under a budget."""

    def __init__(self, module: torch.nn.Module, config: BudgetConfig) -> None:
        self._module, self._config = module, config
        self._is_unlinked = False

    def costs(self, model: CycleModel, static_bytes: float) -> CostTable:
        """Return the cost table of a memory model, with the links over which values can be offloaded."""
        costs = model.costs(static_bytes)
        return with_links(costs, device_of(self._module)) if self._is_linked() else costs

    def _is_linked(self) -> bool:
        return not self._is_unlinked and is_linked(device_of(self._module), self._config.pins)

    def unlink(self, model: CycleModel) -> bool:
        """Plan without offloading from now on, except for pins; return whether plans could offload until now.

        Observations of plans that offload do not correct the memory model any more.
        """
        if not self._is_linked() or pins_offload(self._config.pins):
            return False
        self._is_unlinked = True
        model.forget_corrections()
        return True

    def budget_bytes(self, model: CycleModel, costs: CostTable) -> float:
        return self._config.budget_bytes(self._module, functools.partial(model.plain_bytes, costs))

    def plan(self, model: CycleModel, costs: CostTable, budget_bytes: float, limit_bytes: float) -> Plan:
        """Return the fastest plan for a budget that fits into a limit.

        Raises:
            PlanInfeasibleError: none fits.
        """
        plan = solved(costs, limit_bytes, self._config.pins)
        return self.placed(model, dataclasses.replace(plan, budget_bytes=budget_bytes))

    def placed(self, model: CycleModel, plan: Plan) -> Plan:
        names = tuple(call.block for call in model.calls)
        places = tuple(block.places for block in model.blocks)
        return dataclasses.replace(plan, blocks=names, places=places, model=facts_of(self._module, names))

    def user_error(
        self,
        model: CycleModel,
        costs: CostTable,
        error: PlanInfeasibleError,
        budget_bytes: float,
        static_bytes: float,
        blocks: Collection[str],
        others_bytes: float,
    ) -> PlanInfeasibleError:
        """Return the solver's error in the user's terms: the budget as written, and parts of the model by name.

        Args:
            others_bytes: the smallest budget of other kinds of cycles.
        """
        smallest_bytes = math.ceil(max(_smallest_budget(costs, error, static_bytes), others_bytes))
        num_forwards = 1 + max(call.forward for call in model.calls)
        several = f"{num_forwards} forwards of the model are part of the step before backward has ended"
        advised = advice(model.made_outside, self._module, blocks, error.smallest_bytes)
        smaller = smaller_blocks(self._module, blocks)
        holds = ". ".join(filter(None, (error.holds, several * (num_forwards > 1), smaller, advised)))
        return PlanInfeasibleError(
            f"No plan fits into {format_bytes(budget_bytes)} ({self._config.text}): the smallest budget is "
            f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes). {holds}. Pass that budget or a larger one, or "
            "make the batch smaller.",
            smallest_bytes,
            holds,
        )

    def least_bytes(self, model: CycleModel, static_bytes: float) -> float:
        """Return the smallest feasible budget if it exceeds the user's budget, else 0."""
        costs = self.costs(model, static_bytes)
        try:
            solved(costs, self.budget_bytes(model, costs), self._config.pins)
        except PlanInfeasibleError as error:
            return _smallest_budget(costs, error, static_bytes)
        return 0.0


def _smallest_budget(costs: CostTable, error: PlanInfeasibleError, static_bytes: float) -> float:
    """Return the smallest budget to suggest to a user: what the smallest plan needs, plus a reserve."""
    least_bytes = error.smallest_bytes or 0.0
    reserved_bytes = least_bytes + _RESERVE * (least_bytes - static_bytes) + _RESERVE_BYTES
    return min(reserved_bytes, plain_plan(costs).peak_bytes)
