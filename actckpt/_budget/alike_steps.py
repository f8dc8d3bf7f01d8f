"""The steps of a training that are alike: what was measured in the first of them, and the plan for the others.

They follow NOTE [ A budget in training ] in `training`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._blocks.planned_size import PlannedSize
from actckpt._budget.alive_forwards import AliveForwards
from actckpt._budget.cached_casts import CachedCasts
from actckpt._budget.first_step import FirstStep
from actckpt._budget.growth import Growth
from actckpt._budget.links import give_back_unused, is_linked, poll, prepare, with_links
from actckpt._budget.loss import Loss
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.meters import FixedBytes, Meter
from actckpt._budget.observing import Observing
from actckpt._budget.offloading import solved
from actckpt._budget.outside_graph import OutsideGraph
from actckpt._budget.pace import Pace
from actckpt._budget.planned_model import facts_of
from actckpt._budget.rank_races import RaceNumbers, race_of
from actckpt._budget.retained_graphs import retaining
from actckpt._budget.running import device_of, settings_of, use_settings
from actckpt._budget.shares import Bounds, Part, Share
from actckpt._budget.stalls import Stalls
from actckpt._budget.turns import Race, Turn, entries_of
from actckpt._budget.unmeasured import Unmeasured
from actckpt._budget.wanted import Wanted
from actckpt._budget.watching import Watching
from actckpt._budget.words import COMPILED, EXCEEDED, GROWS, NO_OUTPUTS, RETAINED, TWICE
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.storages import storages_of, tensors_in
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan

__all__ = ["AlikeSteps"]

#: What is fixed has changed where it has by more than this share; less than planned only counts in so many steps.
_CHANGE, _WATCHED_STEPS = 0.01, 3
#: What is free has where it has by more than this share; it is asked for in one of so many steps.
_FREE_CHANGE, _STEPS_PER_LOOK = 0.1, 20


class AlikeSteps:
    """Steps in which the model is called with tensors of the same shapes."""

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: dict[str, CheckpointedForward],
        wanted: Wanted,
        told: set[str],
        numbers: RaceNumbers,
        alive: AliveForwards,
    ) -> None:
        self._model, self._forwards, self._wanted, self._told = model, forwards, wanted, told
        self._numbers, self._alive = numbers, alive
        self._watching: Watching | None = None
        self.measured: MeasuredStep | None = None
        self._first_step: FirstStep | None = None
        self._loss: Loss | None = None
        self._fixed_bytes = self._grown_bytes = self._twice_bytes = 0.0
        self._fixed: FixedBytes | None = None
        #: Steps with a plan, and what it took a forward to be of those that are alive at once.
        self._num_planned, self._part = 0, Part.of_alike(1)
        self._bounds: tuple[MeasuredStep, Bounds] | None = None
        self._keeps_gradients = False
        self._held_output_bytes: float | None = None
        self._race: Race | None = None
        #: A backward retained its graph, and whether the plan knows.
        self._retains = self._retains_planned = False
        #: No block was seen to run; the last forward did not tell where its step ends, and none is
        #: watched before one that does.
        self._is_unseen = self._is_silent = False
        self._device = device_of(model)
        self._offloads, self._pace = is_linked(self._device, wanted.pins), Pace()
        self._observing, self._stalls = Observing(self._device, self._pace), Stalls(self._device, self._pace)
        self.unmeasured, self._growth, self._casts = Unmeasured(model, forwards), Growth(), CachedCasts()
        #: Of the step that was measured before, while it is measured again.
        self._before: tuple[MeasuredStep, float] | None = None
        self._given_bytes = self._budget_bytes = math.inf
        #: Of the plan that ran last.
        self._settings: tuple[Plan, Mapping[str, Settings]] | None = None
        self.plan: Plan | None = None
        self.refused = ""  # why the last one could not be made

    def __getstate__(self) -> dict[str, Any]:
        # A copy has steps of its own, and parameters.
        state = {**vars(self), "_watching": None, "_first_step": None, "_loss": None, "_fixed": None}
        state["_casts"] = CachedCasts()  # not those of its first step
        return state if self._held_output_bytes is not None else {**state, "measured": None}

    def disturb(self) -> None:
        """A forward begins, of this size or of another one: a step that runs is not alone, and tells nothing."""
        if self._alive.num:
            self._observing.give_up()
            self._stalls.give_up()
        self._alive.find_casts = self._alive.find_casts or self._casts.are_alive()
        if self._first_step is not None:
            self._first_step.disturb()
        if self._loss is not None:
            self._loss.disturb()

    def begin(self, *, keeps_gradients: bool) -> None:
        """A forward begins; gradients are there all the time, or not."""
        self._keeps_gradients = keeps_gradients
        self._alive.begin(self)
        if self._is_unseen or self._is_silent:
            use_settings(self._forwards, {})
            if self._is_unseen:
                self._look_at(self._growth.smallest_size(self._forwards))
            return
        if self._growth.wants_measuring and self.measured is not None and self._alive.num_of(self) == 1:
            self._before = self.measured, self._held_output_bytes or 0.0
            self.measured = self._held_output_bytes = self.plan = self._race = None
            use_settings(self._forwards, {})
        if self.measured is None:
            self._watch()
            return
        if self.plan is None and self._held_output_bytes is None:
            use_settings(self._forwards, {})
            return
        self._pace.step()
        is_other = self.unmeasured.wants_plan or self._retains != self._retains_planned
        is_changed = self._alive.part(self) != self._part or self._is_changed() or is_other
        is_observed = self._observing.wants_plan or self._stalls.wants_plan or self._is_free_memory_changed()
        if self.plan is None or is_changed or is_observed:
            self._make_plan()
        self._num_planned += 1
        if self._race is not None:
            self.plan = self._race.next()
            if self._race.is_over:
                self._race = None
        assert self.plan is not None
        if self._settings is None or self._settings[0] is not self.plan:
            self._settings = self.plan, settings_of(self.plan, self._model)
        use_settings(self._forwards, self._settings[1])
        self._look_at(self._growth.planned_size())
        if self._wanted.budget is not None:
            self._observing.begin(self.plan, is_alone=self._alive.num == 1, grown_bytes=self._grown_bytes)
        self._stalls.begin(self.plan, counts=self._alive.num == 1 and self._race is None)

    def _look_at(self, size: PlannedSize) -> None:
        for forward in self._forwards.values():
            forward.planned_size = size

    def _watch(self) -> None:
        if self._offloads:
            prepare(self._device)
        self._first_step = FirstStep(self._model, self._device)
        parts = self._forwards, self._device, self._first_step, OutsideGraph(self._model)
        self._watching = Watching(*parts, offloads=self._offloads, least_bytes=self._growth.least_bytes)

    def ran_larger(self, name: str, given: tuple[float, ...]) -> None:
        """A block that runs first was given tensors of so many bytes, more than when it was measured."""
        if self._is_unseen:
            self._is_unseen = False  # the next forward is measured
            return
        self._growth.ran(name, given)
        if self._growth.has_given_up:
            self._tell(GROWS)
        use_settings(self._forwards, {})
        self._observing.give_up()
        self._stalls.give_up()

    @property
    def bounds(self) -> Bounds | None:
        """What a forward needs of what is not fixed; None: it was not measured yet."""
        if self.measured is None or self._held_output_bytes is None:
            return None if self._bounds is None else self._bounds[1]
        if self._bounds is None or self._bounds[0] is not self.measured:
            from actckpt._budget.fitting import bounds_of  # with the solver: half a second to import

            costs = self._meter(self._alive.part_of_others()).complete(self.measured).costs
            costs = with_links(costs, self._device) if self._offloads else costs
            self._bounds = self.measured, bounds_of(costs, self._wanted.pins)
        return self._bounds[1]

    @property
    def race_steps_left(self) -> int:
        """In how many more steps plans take turns."""
        return 0 if self._race is None else self._race.steps_left

    @property
    def watching_thread(self) -> int | None:
        """The thread that watches a forward now, None where none does."""
        return None if self._watching is None else self._watching.thread

    def give_up(self) -> None:
        """Watch a forward no more whose end nobody told: it was interrupted (no hook is called then)."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None
            self._alive.gone(self)

    def close(self) -> None:
        """Watch nothing more."""
        self.give_up()
        self._observing.close()

    def end(self, result: Any) -> None:
        """A forward has ended, also where it failed."""
        self._growth.forward_ended()
        watching, self._watching = self._watching, None
        outputs = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if watching is not None:
            watching.close()
            watching = None if self._is_too_small(watching) else watching
        if not outputs:  # it failed, or nothing is to be trained
            self._alive.gone(self)
            if watching is not None and watching.is_trained and sys.exc_info()[0] is None:
                self._is_silent = True
                self._tell(NO_OUTPUTS)
            return
        was_silent, self._is_silent = self._is_silent, False
        loss = None if watching is None else self._taken(watching, outputs)
        turn = None if self._race is None else self._race.turn()
        storages = {id(storage): weakref.ref(storage) for storage in storages_of(outputs)}

        def ended() -> None:
            if not was_silent:
                self._backward_ended(turn, [held for ref in storages.values() if (held := ref()) is not None])

        self._alive.follow(self, outputs, lambda: self._backward_begins(loss), ended)

    def _is_too_small(self, watching: Watching) -> bool:
        """Return whether a forward was not measured, since it was too small: what was known before is known again."""
        if watching.is_too_small:
            self._growth.was_too_small()
            self._put_back()
        return watching.is_too_small

    def _put_back(self) -> None:
        """Go on with what was measured before."""
        assert self._before is not None
        (self.measured, self._held_output_bytes), self._before = self._before, None
        self._first_step = self._loss = None

    def _taken(self, watching: Watching, outputs: list[torch.Tensor]) -> Loss:
        """Take what a forward was measured to need; return what tells of the loss."""
        self.measured, self._casts = watching.measured(outputs), watching.casts
        if self.measured is not None:
            self._growth.was_measured(watching.given_bytes)
            if self._before is not None:
                self.unmeasured = Unmeasured(self._model, self._forwards)
            self._before = None
        elif self._before is not None:
            self._growth.was_too_small()
            self._put_back()
        else:
            self._is_unseen = True
            self._growth.was_unseen()
            self._tell(COMPILED)
        self._loss = Loss(outputs, watching.held_bytes())
        return self._loss

    def _backward_begins(self, loss: Loss | None) -> None:
        if torch.is_grad_enabled():
            self._tell(TWICE)
        elif torch_private.keeps_graph():
            self._retains = True
            if self.plan is not None and not self._retains_planned:
                self._tell(RETAINED)
        self._observing.note(is_head=True)
        if loss is not None:
            loss.backward_begins()

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            warn_user(words.format(type(self._model).__name__))

    def _backward_ended(self, turn: Turn | None, held: list[torch.UntypedStorage]) -> None:
        self._observing.ended(self._given_bytes)
        self._stalls.ended()
        if self._held_output_bytes is None:
            self._held_output_bytes = float(sum(storage.nbytes() for storage in held))
            if self._first_step is not None and self._loss is not None and self.measured is not None:
                measured = self._casts.completed(self._loss.added(self.measured))
                self.measured = self._first_step.completed(measured, self._held_output_bytes)
                if self._wanted.budget is not None:  # else nothing is observed
                    self._observing.doubt_bytes = self._first_step.doubt_bytes
            self._first_step = self._loss = None
        if turn is not None:
            turn.end()

    def _meter(self, part: Part | None = None) -> Meter:
        part = part or self._part
        is_alone, wanted = self._alive.num <= 1, self._wanted
        meter = Meter(
            self._model,
            wanted.optimizers,
            total=wanted.budget is not None,
            keeps_gradients=self._keeps_gradients or (part.num > 1 and not part.are_read_together),
            are_read_together=part.are_read_together,
            held_bytes=None if is_alone else self._alive.held_bytes,
        )
        if is_alone:
            self._alive.held_bytes = meter.held_bytes
        return meter

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

    def _make_plan(self) -> None:
        assert self.measured is not None
        poll(self._device)
        if self.plan is None:
            give_back_unused(self._device)
        self._part = self._alive.part(self)
        meter = self._meter()
        measured = meter.complete(self.unmeasured.added(self.measured))
        measured = measured.with_gradients_of_casts() if self._alive.find_casts else measured
        measured = measured.holding("(outputs)", self._held_output_bytes or 0.0)
        self._fixed_bytes, self._grown_bytes, self._fixed = meter.fixed_bytes, 0.0, None
        measured, self._twice_bytes = retaining(measured) if self._retains else (measured, 0.0)
        self._retains_planned = self._retains
        plan, share = self._solved([self._linked(each, meter) for each in self._observing.corrected(measured.costs)])
        facts = facts_of(self._model, measured.names)
        plan = dataclasses.replace(plan, blocks=measured.names, places=measured.places, model=facts)
        self._given_bytes, self.plan, self._race = share.given_bytes, plan, None
        if self._wanted.race and not self._wanted.pins:
            self._race = race_of(entries_of(plan, share.nbytes, self._device), self._device, self._numbers.next())
        if self._wanted.budget is not None:
            self._observing.watch(self._model.get_submodule(measured.names[-2] or ""))
        for forward in self._forwards.values():
            forward.together.is_watching = True  # so that the report has a step of the plan

    def _linked(self, costs: CostTable, meter: Meter) -> tuple[CostTable, Share]:
        share = self._share(costs, meter)
        costs = with_links(costs, self._device) if share.has_reserve and self._offloads else costs
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

    def _solved(self, tables: list[tuple[CostTable, Share]]) -> tuple[Plan, Share]:
        """Return the plan for the first table that has one; the one that needs least where more was observed."""
        from actckpt._budget.fitting import smallest_plan

        errors: list[PlanInfeasibleError] = []
        for costs, share in tables:
            try:
                return solved(costs, share.nbytes, self._wanted.pins), share
            except PlanInfeasibleError as error:
                errors.append(share.infeasible(error).with_traceback(None))
                smallest_bytes = error.smallest_bytes
        is_late = self._growth.has_grown or self._num_planned > (0 if self._retains else _WATCHED_STEPS)
        is_late = is_late or self._observing.has_corrected or self.unmeasured.has_calls
        if not is_late or smallest_bytes is None:
            self.refused = str(errors[0])
            raise errors.pop(0) from None
        warn_user(EXCEEDED.format(errors[0]))  # where the model is called
        return smallest_plan(costs, smallest_bytes, self._wanted.pins), share
