"""One kind of cycle: what was measured of it, the plan that it runs, and what comes next (NOTE [ The loop ] in `loop`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._blocks.outside import advice
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.cycle_model import CycleModel
from actckpt._budget.infeasible import Infeasible, infeasible_error
from actckpt._budget.links import is_linked, with_links
from actckpt._budget.offloading import solved
from actckpt._budget.planned_model import facts_of
from actckpt._budget.running import RECOMPUTE, device_of, settings_of
from actckpt._budget.settled_block import SettledBlock
from actckpt._budget.simple import plain_plan, simple_plans
from actckpt._budget.timeline import Cycle
from actckpt._budget.trials import Candidate, Trials
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["BudgetConfig", "Kind"]

#: Rounds of correction, and the share of the budget that may be left while values are dropped.
_MOST_ROUNDS, _UNUSED = 3, 0.02
#: Static bytes changed where they did by more than this share; they are looked at in the first cycles and then now and then.
_CHANGE, _FIRST_LOOKS, _CYCLES_PER_LOOK = 0.01, 4, 16
#: What an error adds to the smallest budget, for what differs between cycles: a share of what is no static memory, and bytes.
_RESERVE, _RESERVE_BYTES = 0.005, 4096
#: So often a kind is measured.
_MOST_MEASURED = 8

Stage = Literal["measure", "fit", "try", "settled"]


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A plan that ran under a meter."""

    plan: Plan
    peak_bytes: float


class Kind:
    """Cycles that are alike.

    Attributes:
        stage: what the next cycle is for.
        plan: the one to stay with; None: not made yet.
        left_bytes: what an earlier cycle of the step left behind, when that was last metered.
        running_plan: that of the cycle, a candidate's in a trial; None: everything is recomputed.
        refused: why it exceeds the budget, or why there is none; empty where it fits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: Mapping[str, CheckpointedForward],
        config: BudgetConfig,
        infeasible: Infeasible,
    ) -> None:
        self._module, self._forwards, self._config = model, forwards, config
        self._infeasible = infeasible
        self.stage: Stage = "measure"
        self.plan: Plan | None = None
        self.running_plan: Plan | None = None
        self.refused = ""
        self.is_measured_now = False
        self.left_bytes = 0
        self._model: CycleModel | None = None
        self._attempts: list[_Attempt] = []
        self._trials: Trials | None = None
        self._settings: list[Mapping[str, Settings]] = []
        self._forward_keys: list[Any] = []
        self._static_bytes = self._budget_bytes = 0.0
        self._num_cycles = self._num_measured = 0

    @property
    def num_trials_left(self) -> int:
        """How many more cycles may be trials."""
        return 0 if self._trials is None else self._trials.num_cycles_left

    # What a cycle does.

    def begin(self, static_bytes: float) -> bool:
        """A cycle begins; return whether it is metered.

        Raises:
            PlanInfeasibleError: no plan fits, and the user asked for this error.
        """
        self.is_measured_now = self.stage == "measure"
        if self.is_measured_now:
            self._forward_keys, self.running_plan = [], None
            return True
        if self._is_changed(static_bytes):
            self._attempts, self._trials, self.stage = [], None, "fit"
            self._static_bytes = static_bytes
        self._num_cycles += 1
        if self.stage == "fit" and not self._attempts_are_open():
            self._solve(static_bytes)
        if self._trials is None:
            return self.stage == "fit"
        candidate = self._trials.next()
        self._run(candidate.plan)
        return not candidate.is_measured

    def settings(self, number: int, key: Any) -> Mapping[str, Settings] | None:
        """Return how blocks run in a forward of the cycle; None: they recompute everything.

        Args:
            number: of the forward in the cycle.
            key: its shapes and flags.
        """
        if self.is_measured_now:
            self._forward_keys.append(key)
            return dict.fromkeys(self._forwards, RECOMPUTE)
        is_known = number < len(self._settings) and self._forward_keys[number] == key
        return self._settings[number] if is_known else None

    def end(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        """A cycle has ended."""
        if self.is_measured_now:
            self._measured(cycle, blocks)
        elif cycle.is_void or self._model is None:
            return
        elif self._trials is not None:
            self._tried(cycle)
        elif self.stage == "fit" and tuple(cycle.calls) == self._model.calls:
            self._fit(cycle)

    def measure_again(self) -> bool:
        """A plan did not know what ran; return whether the next cycle is measured."""
        if self._num_measured >= _MOST_MEASURED:
            return False
        self.stage = "measure"
        return True

    # Stages.

    def _measured(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        """Take over what a cycle was measured to need, unless it is less than what is known."""
        self._num_measured += 1
        if cycle.is_void or not cycle.calls or len(blocks) != len(cycle.calls) or not cycle.num_backwards:
            self.stage = "measure" if self._model is None else self._stage_before()
            return
        model = CycleModel(cycle, blocks)
        if self._model is not None and len(model.calls) < len(self._model.calls):
            self.stage = self._stage_before()
            return
        self._model, self._attempts, self._trials, self.plan = model, [], None, None
        self.stage, self._num_cycles, self._static_bytes = "fit", 0, cycle.static_bytes

    def _stage_before(self) -> Stage:
        return "settled" if self.plan is not None else "fit"

    def _attempts_are_open(self) -> bool:
        """Return whether the plan was solved and waits to be observed."""
        return self.plan is not None and len(self._attempts) > 0 and self._attempts[-1].plan is not self.plan

    def _solve(self, static_bytes: float) -> None:
        assert self._model is not None
        self._static_bytes = static_bytes
        costs = self._costs(static_bytes)
        self._budget_bytes, self.refused = self._config.budget_bytes(costs, self._module), ""
        try:
            self.plan = self._planned(costs)
        except PlanInfeasibleError as error:
            self.plan = self._smallest(costs, error)
        self._run(self.plan)

    def _costs(self, static_bytes: float) -> CostTable:
        assert self._model is not None
        costs, device = self._model.costs(static_bytes), device_of(self._module)
        return with_links(costs, device) if is_linked(device, self._config.pins) else costs

    def _smallest(self, costs: CostTable, error: PlanInfeasibleError) -> Plan:
        """No plan fits: return the one that needs least, with a warning."""
        assert self._model is not None
        least, is_late = error.smallest_bytes, len(self._attempts) > 0
        if least is None:
            raise error
        reserve = _RESERVE * (least - self._static_bytes) + _RESERVE_BYTES
        told = infeasible_error(
            error,
            budget=self._config.text,
            budget_bytes=self._budget_bytes,
            smallest_bytes=math.ceil(min(least + reserve, plain_plan(costs).peak_bytes)),
            cause=advice(self._model.made_outside, self._module, self._forwards, least),
        )
        self.refused, self.plan = str(told), None
        if self._infeasible.raises(is_late=is_late, has_alternative=False):
            raise told
        self._infeasible.warn(told, is_late=is_late)
        return self._planned(costs, least)

    def _planned(self, costs: CostTable, nbytes: float | None = None) -> Plan:
        plan = solved(costs, self._budget_bytes if nbytes is None else nbytes, self._config.pins)
        return self._placed(dataclasses.replace(plan, budget_bytes=self._budget_bytes))

    def _placed(self, plan: Plan) -> Plan:
        """Return a plan that knows where its values are in the model."""
        assert self._model is not None
        names = tuple(call.block for call in self._model.calls)
        return dataclasses.replace(plan, blocks=names, places=self._model.places, model=facts_of(self._module, names))

    def _fit(self, cycle: Cycle) -> None:
        """A metered cycle under the plan has ended: correct the model and solve again, or stay."""
        assert self._model is not None and self.plan is not None
        self._attempts.append(_Attempt(self.plan, cycle.peak_bytes))
        is_over = cycle.peak_bytes > self._budget_bytes
        is_unused = cycle.peak_bytes < (1 - _UNUSED) * self._budget_bytes and self.plan.overhead_seconds > 0.0
        if (is_over or is_unused) and len(self._attempts) <= _MOST_ROUNDS and self._solve_again(cycle):
            return
        fitting = [each for each in self._attempts if each.peak_bytes <= self._budget_bytes]
        best = (
            min(fitting, key=lambda each: each.plan.overhead_seconds)
            if fitting
            else min(self._attempts, key=lambda each: each.peak_bytes)
        )
        self.plan = dataclasses.replace(best.plan, peak_bytes=best.peak_bytes)
        self._run(self.plan)
        self.stage = "settled"
        self._begin_trials()

    def _solve_again(self, cycle: Cycle) -> bool:
        """Correct the model by a cycle; return whether that leads to another plan."""
        from actckpt.planner.simulation import needs

        assert self._model is not None and self.plan is not None
        before, plan, budget_bytes = self._model.corrections(), self.plan, self._budget_bytes
        self._model.observe(cycle, plan, needs(self._costs(cycle.static_bytes), plan))
        try:
            self._solve(cycle.static_bytes)
        except PlanInfeasibleError:
            self._model.restore(before)
            self.plan, self._budget_bytes = plan, budget_bytes
            return False
        tried = [(each.plan.actions, each.plan.rerun) for each in self._attempts]
        return self.plan is not None and (self.plan.actions, self.plan.rerun) not in tried

    def _begin_trials(self) -> None:
        plan = self.plan
        assert plan is not None
        if not self._config.race or self._config.pins or plan.overhead_seconds == 0.0:
            return
        candidates = [Candidate("plan", plan, plan.peak_bytes, is_measured=True)]
        for name, other in simple_plans(plan.costs):
            is_same = any(other.actions == each.plan.actions and other.rerun == each.plan.rerun for each in candidates)
            if not is_same:
                placed = self._placed(dataclasses.replace(other, budget_bytes=self._budget_bytes))
                candidates.append(Candidate(name, placed, other.peak_bytes, fits=other.peak_bytes <= self._budget_bytes))
        if sum(each.fits for each in candidates) > 1:
            self._trials, self.stage = Trials(candidates, self._budget_bytes), "try"

    def _tried(self, cycle: Cycle) -> None:
        """A trial has ended."""
        assert self._trials is not None
        if cycle.meter is not None:
            self._trials.note_peak(cycle.peak_bytes)
        else:
            self._trials.note_time(cycle.began, device_of(self._module))
        if self._trials.is_over:
            self.plan, self._trials, self.stage = self._trials.result(), None, "settled"
            self._run(self.plan)
    
    def _run(self, plan: Plan) -> None:
        """Let the next cycles run a plan: each forward its part of it."""
        assert self._model is not None and plan.blocks is not None and plan.places is not None
        self.running_plan = plan
        for forward in self._forwards.values():  # its first cycle is metered, so no trial is slower by that
            forward.together.record_first_step(plan)
        num_forwards = 1 + max(call.forward for call in self._model.calls)
        self._settings = []
        for number in range(num_forwards):
            own = [at for at, call in enumerate(self._model.calls) if call.forward == number]
            part = dataclasses.replace(
                plan,
                actions=tuple(plan.actions[at] for at in own),
                rerun=tuple(plan.rerun[at] for at in own),
                blocks=tuple(plan.blocks[at] for at in own),
                places=tuple(plan.places[at] for at in own),
                windows=None if plan.windows is None else tuple(plan.windows[at] for at in own),
                costs=dataclasses.replace(plan.costs, stack=tuple(plan.costs.stack[at] for at in own), segments=None),
            )
            self._settings.append(settings_of(part, self._module))

    def _is_changed(self, static_bytes: float) -> bool:
        """Return whether what existed before the cycle is not what the plan was made for."""
        if self.plan is None:
            return False
        return abs(static_bytes - self._static_bytes) > _CHANGE * self._static_bytes
