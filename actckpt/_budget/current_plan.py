"""The plan for steps that are alike: when it must be made again, and how.

It follows NOTE [ A budget in training ] in `training`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._blocks.outside import advice
from actckpt._budget.alive_forwards import AliveForwards
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.infeasible import Infeasible, with_cause
from actckpt._budget.links import give_back_unused, is_linked, poll, with_links
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.meters import FixedBytes, Meter
from actckpt._budget.observing import Observing
from actckpt._budget.pace import Pace
from actckpt._budget.planned_model import facts_of
from actckpt._budget.rank_races import RaceNumbers, race_of
from actckpt._budget.retained_graphs import retaining
from actckpt._budget.running import device_of, settings_of
from actckpt._budget.shares import Bounds, Part, Share
from actckpt._budget.stalls import Stalls
from actckpt._budget.turns import Race, Turn, entries_of
from actckpt._budget.unmeasured import Unmeasured
from actckpt._core import devices
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["CurrentPlan"]

#: What is fixed has changed where it has by more than this share; less than planned only counts in so many steps.
_CHANGE, _WATCHED_STEPS = 0.01, 3
#: What is free has where it has by more than this share; it is asked for in one of so many steps.
_FREE_CHANGE, _STEPS_PER_LOOK = 0.1, 20


class CurrentPlan:
    """The plan for steps that are alike, as far as it is known what they need.

    Attributes:
        measured: what a step costs; None: that was not measured yet.
        held_output_bytes: of outputs that the program holds when backward has ended; None: it has not yet.
        unmeasured: calls of blocks that came since then.
        keeps_gradients: they are there all the time.
        may_be_exceeded: steps were larger than the one that was measured.
        plan: the one that ran last.
        refused: why no plan fits; empty: the one that ran last does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: dict[str, CheckpointedForward],
        wanted: BudgetConfig,
        numbers: RaceNumbers,
        alive: AliveForwards,
        infeasible: Infeasible,
    ) -> None:
        self._infeasible = infeasible
        self._model, self._forwards, self._wanted = model, forwards, wanted
        self._numbers, self._alive = numbers, alive
        self.device = device_of(model)
        self.offloads, self._pace = is_linked(self.device, wanted.pins), Pace()
        self._observing, self._stalls = Observing(self.device, self._pace), Stalls(self.device, self._pace)
        self.measured: MeasuredStep | None = None
        self.held_output_bytes: float | None = None
        self.unmeasured = Unmeasured(model, forwards)
        self.keeps_gradients = self.may_be_exceeded = False
        self._fixed_bytes = self._grown_bytes = self._twice_bytes = 0.0
        self._fixed: FixedBytes | None = None
        #: Steps with a plan, and what it took a forward to be of those that are alive at once.
        self._num_planned, self._part = 0, Part.of_alike(1)
        self._bounds: tuple[MeasuredStep, Bounds] | None = None
        self._race: Race | None = None
        #: A backward retained its graph, and whether the plan knows.
        self._retains = self._retains_planned = False
        #: Whether the plan knows that casts are there of another forward.
        self._finds_casts = False
        self._given_bytes = self._budget_bytes = math.inf
        #: Of the plan that ran last.
        self._settings: tuple[Plan, Mapping[str, Settings]] | None = None
        self.plan: Plan | None = None
        #: That of the forward that runs: of a trial, or of a smaller size.
        self.running: Plan | None = None
        #: The one that was made last, which others take turns with in a race.
        self._solved: Plan | None = None
        self.refused = ""

    @property
    def is_known(self) -> bool:
        """Whether a plan is there, or can be made."""
        return self.plan is not None or self.held_output_bytes is not None

    def forget(self) -> None:
        """The step is measured again."""
        self.measured = self.held_output_bytes = self.plan = self.running = self._race = None

    def complete(self, measured: MeasuredStep, doubt_bytes: float) -> None:
        """The backward of the step that was measured has ended.

        Args:
            doubt_bytes: of the head, that it may need less.
        """
        self.measured = measured
        if self._wanted.budget is not None:  # else nothing is observed
            self._observing.doubt_bytes = doubt_bytes

    def next(self, *, is_smaller: bool, has_alternative: bool) -> Mapping[str, Settings]:
        """A forward begins under the plan; return what each block does.

        Args:
            is_smaller: it is of a smaller size.
            has_alternative: where no plan fits, another one may be made for that size.
        """
        self._pace.step()
        is_observed = self._observing.wants_plan or self._stalls.wants_plan or self._is_free_memory_changed()
        if self.plan is None or self._is_outdated() or is_observed:
            self._make(has_alternative=has_alternative)
        self._num_planned += 1
        if self._race is not None and not is_smaller:
            self.plan = self._race.next()
            if self._race.is_over:
                self._race = None
        plan = self.running = self._solved if is_smaller and self._race is not None else self.plan
        assert plan is not None
        if self._wanted.budget is not None:
            is_alone = self._alive.num == 1
            self._observing.begin(plan, is_alone=is_alone, is_smaller=is_smaller, grown_bytes=self._grown_bytes)
        self._stalls.begin(plan, counts=self._alive.num == 1 and self._race is None and not is_smaller)
        if self._settings is None or self._settings[0] is not plan:
            self._settings = plan, settings_of(plan, self._model)
            for forward in self._forwards.values():
                forward.together.record_first_step(plan)
        return self._settings[1]

    def turn(self) -> Turn | None:
        """Return the step of a race that runs now; None: it is in none."""
        return None if self._race is None else self._race.turn()

    @property
    def reported(self) -> Plan | None:
        """The plan that goes on to run: while it is tried against simple choices, the one that was solved."""
        return self.plan if self._race is None else self._solved

    def settle(self) -> None:
        """A step has ended: where it was the last one of a race whose times are known, its winner runs from now on."""
        winner = None if self._race is None else self._race.winner()
        if winner is not None:
            self.plan, self._race = winner, None

    @property
    def race_steps_left(self) -> int:
        """In how many more steps plans take turns."""
        return 0 if self._race is None else self._race.steps_left

    def retains(self) -> bool:
        """A backward retains its graph; return whether there is a plan that does not know that."""
        self._retains = True
        return self.plan is not None and not self._retains_planned

    def give_up_observing(self) -> None:
        """The step that runs tells nothing."""
        self._observing.give_up()
        self._stalls.give_up()

    def backward_begins(self) -> None:
        """Backward has reached the outputs of the model."""
        self._observing.note(is_head=True)

    def backward_ended(self) -> None:
        """The step has ended."""
        self._observing.ended(self._given_bytes)
        self._stalls.ended()

    def close(self) -> None:
        """Observe nothing more."""
        self._observing.close()

    @property
    def bounds(self) -> Bounds | None:
        """What a forward needs of what is not fixed; None: it was not measured yet."""
        if self.measured is None or self.held_output_bytes is None:
            return None if self._bounds is None else self._bounds[1]
        if self._bounds is None or self._bounds[0] is not self.measured:
            from actckpt._budget.fitting import bounds_of  # with the solver: half a second to import

            costs = self._meter(self._alive.part_of_others()).complete(self.measured).costs
            costs = with_links(costs, self.device) if self.offloads else costs
            self._bounds = self.measured, bounds_of(costs, self._wanted.pins)
        return self._bounds[1]

    def _meter(self, part: Part | None = None) -> Meter:
        part = part or self._part
        is_alone, wanted = self._alive.num <= 1, self._wanted
        meter = Meter(
            self._model,
            wanted.optimizers,
            total=wanted.budget is not None,
            keeps_gradients=self.keeps_gradients or (part.num > 1 and not part.are_read_together),
            are_read_together=part.are_read_together,
            held_bytes=None if is_alone else self._alive.held_bytes,
        )
        if is_alone:
            self._alive.held_bytes = meter.held_bytes
        return meter

    def _is_outdated(self) -> bool:
        """Return whether the plan does not know what is known by now."""
        is_other = self.unmeasured.wants_plan or self._retains != self._retains_planned
        is_other = is_other or self._finds_casts != self._alive.find_casts
        return is_other or self._alive.part(self) != self._part or self._is_changed()

    def _is_changed(self) -> bool:
        """Return whether what is fixed is more than planned, or less; what other forwards hold is not."""
        if self.plan is None or self._wanted.budget is None or self._alive.num_of(self) > 1:
            return False
        if self._fixed is None:
            self._fixed = FixedBytes(self._model, self._wanted.optimizers, self._meter().fixed_bytes)
        more_bytes = self._fixed.now(self._meter) - self._fixed_bytes
        self._grown_bytes = max(more_bytes, 0.0)
        has_shrunk = self._num_planned < _WATCHED_STEPS and -more_bytes > _CHANGE * self._fixed_bytes
        return has_shrunk or more_bytes > _CHANGE * self._fixed_bytes

    def _is_free_memory_changed(self) -> bool:
        """Return whether a budget that is what is free is another one now."""
        is_asked = self._wanted.is_what_is_free and self._num_planned % _STEPS_PER_LOOK == 0 and self._pace.is_due
        if self.plan is None or not is_asked or self._alive.num > 1:
            return False
        now = self._meter().budget_bytes(self._wanted.budget)
        if abs(now - self._budget_bytes) <= _FREE_CHANGE * self._budget_bytes:
            return False
        self._pace.use()
        return True

    def _make(self, *, has_alternative: bool) -> None:
        from actckpt._budget.fitting import plan_within  # with the solver: half a second to import

        poll(self.device)
        if self.plan is None:
            give_back_unused(self.device)
        self._part = self._alive.part(self)
        meter = self._meter()
        measured = self._measured_now(meter)
        tables = [self._linked(each, meter) for each in self._observing.corrected(measured.costs)]
        costs, share = tables[-1]
        if share.has_reserve and devices.counting(self.device) is not None:
            tables.append((costs, dataclasses.replace(share, has_least=True)))

        def refuse(error: PlanInfeasibleError) -> None:
            is_late, made = self._is_late(), measured.made_outside
            error = with_cause(error, advice(made, self._model, self._forwards, error.smallest_bytes))
            self.refused = str(error)
            if self._infeasible.raises(is_late=is_late, has_alternative=has_alternative):
                raise error
            self._infeasible.warn(error, is_late=is_late)

        self.refused, self.plan = "", None  # the one of before does not fit either
        plan, share = plan_within(tables, self._wanted.pins, refuse)
        facts = facts_of(self._model, measured.names)
        plan = dataclasses.replace(plan, blocks=measured.names, places=measured.places, model=facts)
        self._given_bytes, self.plan, self._solved, self._race = share.given_bytes, plan, plan, None
        if self._wanted.race and not self._wanted.pins:
            self._race = race_of(entries_of(plan, share.nbytes, self.device), self.device, self._numbers.next())
        if self._wanted.budget is not None:
            self._observing.watch(self._model.get_submodule(measured.names[-2] or ""))

    def _measured_now(self, meter: Meter) -> MeasuredStep:
        """Return the step as it runs now, with all that counts."""
        assert self.measured is not None
        measured = meter.complete(self.unmeasured.added(self.measured))
        self._finds_casts = self._alive.find_casts
        measured = measured.beside_others(are_counted=meter.counts_all_there) if self._finds_casts else measured
        measured = measured.holding("(outputs)", self.held_output_bytes or 0.0)
        self._fixed_bytes, self._grown_bytes, self._fixed = meter.fixed_bytes, 0.0, None
        measured, self._twice_bytes = retaining(measured) if self._retains else (measured, 0.0)
        self._retains_planned = self._retains
        return measured

    def _linked(self, costs: CostTable, meter: Meter) -> tuple[CostTable, Share]:
        share = self._share(costs, meter)
        costs = with_links(costs, self.device) if share.has_reserve and self.offloads else costs
        return self._stalls.corrected(costs), share

    def _share(self, costs: CostTable, meter: Meter) -> Share:
        """Return what a forward may use."""
        from actckpt._budget.simple import plain_plan  # with the solver: half a second to import

        plain_bytes = plain_plan(costs).peak_bytes
        if self._wanted.activation_budget is None:
            nbytes = self._budget_bytes = meter.budget_bytes(self._wanted.budget)
        else:
            budget, own_bytes = self._wanted.activation_budget, plain_bytes - self._twice_bytes
            nbytes = self._part.budget_bytes(budget, plain_bytes=own_bytes, fixed_bytes=self._fixed_bytes)
        share = Share(nbytes, self._fixed_bytes, self._part, has_reserve=False, given=self._wanted.text)
        fits = plain_bytes <= share.nbytes  # then nothing is to be done
        return share if fits else dataclasses.replace(share, has_reserve=True)

    def _is_late(self) -> bool:
        """Return whether the program has come too far to be stopped where no plan fits."""
        is_late = self.may_be_exceeded or self._num_planned > (0 if self._retains else _WATCHED_STEPS)
        return is_late or self._observing.has_corrected or self.unmeasured.has_calls
