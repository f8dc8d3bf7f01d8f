"""The steps of a training that are alike: what was measured in the first of them, and the plan for the others.

They follow NOTE [ A budget in training ] in `training`.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward
from actckpt._blocks.planned_size import PlannedSize
from actckpt._budget.alive_forwards import AliveForwards
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.cached_casts import CachedCasts
from actckpt._budget.current_plan import CurrentPlan
from actckpt._budget.first_step import FirstStep
from actckpt._budget.growth import Growth
from actckpt._budget.infeasible import Infeasible
from actckpt._budget.links import prepare
from actckpt._budget.loss import Loss
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.outside_graph import OutsideGraph
from actckpt._budget.rank_races import RaceNumbers
from actckpt._budget.running import use_settings
from actckpt._budget.shapes import Shapes
from actckpt._budget.turns import Turn
from actckpt._budget.unmeasured import Unmeasured
from actckpt._budget.watching import Watching
from actckpt._budget.words import COMPILED, GROWS, NO_OUTPUTS, RETAINED, TWICE
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.storages import storages_of, tensors_in
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.plans import Plan

__all__ = ["AlikeSteps"]


class AlikeSteps:
    """Steps in which the model is called with tensors of the same shapes."""

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: dict[str, CheckpointedForward],
        wanted: BudgetConfig,
        told: set[str],
        numbers: RaceNumbers,
        alive: AliveForwards,
        infeasible: Infeasible,
    ) -> None:
        self._model, self._forwards, self._told, self._alive = model, forwards, told, alive
        self._plan = CurrentPlan(model, forwards, wanted, numbers, alive, infeasible)
        self._watching: Watching | None = None
        self._first_step: FirstStep | None = None
        self._loss: Loss | None = None
        #: No block was seen to run; the last forward did not tell where its step ends, and none is
        #: watched before one that does.
        self._is_unseen = self._is_silent = False
        self._growth, self._casts = Growth(), CachedCasts()
        #: Of the step that was measured before, while it is measured again.
        self._before: tuple[MeasuredStep, float] | None = None

    def disturb(self) -> None:
        """A forward begins, of this size or of another one: a step that runs is not alone, and tells nothing."""
        if self._alive.num:
            self._plan.give_up_observing()
        self._alive.find_casts = self._alive.find_casts or self._casts.are_alive()
        if self._first_step is not None:
            self._first_step.disturb()
        elif not self._casts.are_alive():
            self._casts = CachedCasts()  # which is faster to ask
        if self._loss is not None:
            self._loss.disturb()

    def begin(self, *, keeps_gradients: bool, is_smaller: bool, shapes: Shapes | None) -> None:
        """A forward begins.

        Args:
            keeps_gradients: they are there all the time.
            is_smaller: it is of a smaller size than these steps, and runs their plan.
            shapes: what is alive then; None: one of this size.
        Raises:
            PlanInfeasibleError: no plan fits; the forward does not run.
        """
        self._plan.keeps_gradients = keeps_gradients
        self._alive.begin(self._plan if shapes is None else shapes)
        try:
            self._use_plan(is_smaller=is_smaller, has_alternative=shapes is not None)
        except PlanInfeasibleError:
            self._alive.refused()
            raise

    def _use_plan(self, *, is_smaller: bool, has_alternative: bool) -> None:
        if self._is_unseen or self._is_silent:
            use_settings(self._forwards, {})
            if self._is_unseen:
                self._look_at(self._growth.smallest_size(self._forwards))
            return
        measured = self._plan.measured
        is_alone = self._alive.num_of(self._plan) == 1
        if self._growth.wants_measuring and measured is not None and is_alone and not is_smaller:
            self._before = measured, self._plan.held_output_bytes or 0.0
            self._plan.forget()
            use_settings(self._forwards, {})
        if self._plan.measured is None and not is_smaller:
            self._watch()
        elif self._plan.measured is None or not self._plan.is_known:
            use_settings(self._forwards, {})
        else:
            use_settings(self._forwards, self._plan.next(is_smaller=is_smaller, has_alternative=has_alternative))
            self._look_at(self._growth.planned_size())

    def _look_at(self, size: PlannedSize) -> None:
        for forward in self._forwards.values():
            forward.planned_size = size

    def _watch(self) -> None:
        device, offloads = self._plan.device, self._plan.offloads
        if offloads:
            prepare(device)
        self._first_step = FirstStep(self._model, device)
        parts = self._forwards, device, self._first_step, OutsideGraph(self._model)
        self._watching = Watching(self._model, *parts, offloads=offloads, least_bytes=self._growth.least_bytes)

    def ran_larger(self, name: str, given: tuple[float, ...], *, is_smaller: bool) -> None:
        """A block that runs first was given tensors of so many bytes, more than when it was measured.

        Args:
            is_smaller: in a forward of a smaller size.
        """
        if self._is_unseen:
            self._is_unseen = False  # the next forward is measured
            return
        if is_smaller:  # of its size the next one is measured
            use_settings(self._forwards, {})
            self._plan.give_up_observing()
            return
        self._growth.ran(name, given)
        self._plan.may_be_exceeded = True
        if self._growth.has_given_up:
            self._tell(GROWS)
        use_settings(self._forwards, {})
        self._plan.give_up_observing()

    def ran_unplanned(self, name: str) -> bool:
        """A block ran that the plan has nothing for; return whether the next plan has it."""
        measured = self._plan.measured
        return measured is not None and self._plan.unmeasured.note(name, measured)

    @property
    def plan(self) -> Plan | None:
        """The plan that a report shows; None until one is made."""
        return self._plan.reported

    @property
    def running_plan(self) -> Plan | None:
        """The plan of the forward that runs."""
        return self._plan.running

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan, or will be at the next forward or so: a step is measured, or was."""
        is_measured = self._plan.measured is not None and not self._plan.refused
        return self._plan.plan is not None or self._before is not None or is_measured

    @property
    def refused(self) -> str:
        """Why no plan fits; empty: the one that ran last does."""
        return self._plan.refused

    @property
    def race_steps_left(self) -> int:
        """In how many more steps plans take turns."""
        return self._plan.race_steps_left

    @property
    def watching_thread(self) -> int | None:
        """The thread that watches a forward now, None where none does."""
        return None if self._watching is None else self._watching.thread

    def give_up(self) -> bool:
        """Watch a forward no more that has not ended: it was interrupted (no hook is called then), or calls the model.

        Returns:
            Whether one was watched.
        """
        is_watched = self._watching is not None
        if self._watching is not None:
            self._watching.close()
            self._watching = None
            self._alive.gone(self._plan)
        return is_watched

    def interrupted(self, shapes: Shapes | None) -> None:
        """A forward that ran under a plan did not end; it began as this says."""
        self._alive.gone(self._plan if shapes is None else shapes)

    def close(self) -> None:
        """Watch nothing more."""
        self.give_up()
        self._plan.close()

    def end(self, result: Any, *, is_smaller: bool, shapes: Shapes | None) -> None:
        """A forward has ended, also where it failed; it began as this says."""
        self._growth.forward_ended()
        watching, self._watching = self._watching, None
        outputs = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if watching is not None:
            watching.close()
            watching = None if self._is_too_small(watching) else watching
        if not outputs:  # it failed, or nothing is to be trained
            self._alive.gone(self._plan if shapes is None else shapes)
            if watching is not None and watching.is_trained and sys.exc_info()[0] is None:
                self._is_silent = True
                self._tell(NO_OUTPUTS)
            return
        was_silent, self._is_silent = self._is_silent, False
        loss = None if watching is None else self._taken(watching, outputs)
        turn = None if is_smaller else self._plan.turn()
        storages = {id(storage): weakref.ref(storage) for storage in storages_of(outputs)}

        def ended() -> None:
            if not was_silent:
                self._backward_ended(turn, [held for ref in storages.values() if (held := ref()) is not None])

        self._alive.follow(
            self._plan if shapes is None else shapes, outputs, lambda: self._backward_begins(loss), ended
        )

    def _is_too_small(self, watching: Watching) -> bool:
        """Return whether a forward was not measured, since it was too small: what was known before is known again."""
        if watching.is_too_small:
            self._growth.was_too_small()
            self._put_back()
        return watching.is_too_small

    def _put_back(self) -> None:
        """Go on with what was measured before."""
        assert self._before is not None
        (self._plan.measured, self._plan.held_output_bytes), self._before = self._before, None
        self._first_step = self._loss = None

    def _taken(self, watching: Watching, outputs: list[torch.Tensor]) -> Loss:
        """Take what a forward was measured to need; return what tells of the loss."""
        measured, self._casts = watching.measured(outputs), watching.casts
        self._plan.measured = measured
        if measured is not None:
            self._growth.was_measured(watching.given_bytes)
            self._alive.find_casts = self._alive.find_casts or bool(measured.casts_found)
            if self._before is not None:
                self._plan.unmeasured = Unmeasured(self._model, self._forwards)
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
        elif torch_private.keeps_graph() and self._plan.retains():
            self._tell(RETAINED)
        self._plan.backward_begins()
        if loss is not None:
            loss.backward_begins()

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            warn_user(words.format(type(self._model).__name__))

    def _backward_ended(self, turn: Turn | None, held: list[torch.UntypedStorage]) -> None:
        self._plan.backward_ended()
        if self._plan.held_output_bytes is None:
            held_bytes = float(sum(storage.nbytes() for storage in held))
            held_bytes += 0.0 if self._loss is None else self._loss.held_bytes
            self._plan.held_output_bytes = held_bytes
            if self._first_step is not None and self._loss is not None and self._plan.measured is not None:
                measured = self._casts.completed(self._loss.added(self._plan.measured))
                measured = self._first_step.completed(measured, held_bytes, is_retained=self._loss.is_retained)
                self._plan.complete(measured, self._first_step.doubt_bytes)
            self._first_step = self._loss = None
        if turn is not None:
            turn.end()
            self._plan.settle()
