"""A training step is measured, solved for a budget, and run: what `actckpt.plan` does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from actckpt._blocks.outside import advice
from actckpt._budget.fitting import fitted
from actckpt._budget.infeasible import with_cause
from actckpt._budget.links import flush, is_linked, prepare, with_links
from actckpt._budget.measuring import MeasuredStep, measure
from actckpt._budget.meters import Meter
from actckpt._budget.not_run import why_not_run
from actckpt._budget.planned_model import facts_of
from actckpt._budget.racing import race_plans
from actckpt._budget.running import Candidate, device_of, forwards_of, settings_of
from actckpt._budget.simple import NOTHING, plain_plan, simple_plans
from actckpt._budget.sizes import activation_budget_bytes
from actckpt._core.steps import Step
from actckpt._core.training_state import TrainingState
from actckpt.action import Action
from actckpt.errors import BlocksError, PlanInfeasibleError
from actckpt.planner.plans import Plan
from actckpt.statistics import uncounted

__all__ = ["planned"]


@uncounted()
def planned(
    step: Callable[[], object],
    model: torch.nn.Module,
    blocks: dict[str, torch.nn.Module],
    budget: float | str | None,
    activation_budget: float | str | None,
    optimizers: tuple[torch.optim.Optimizer, ...],
    pins: Mapping[Any, Action | str] | None,
    *,
    race: bool,
) -> Plan:
    """Return the fastest plan that fits. Arguments and errors are those of `actckpt.plan`, which see."""
    checked = Step(step, "plan", model)
    state = TrainingState(model, optimizers)
    try:
        offloads = is_linked(device_of(model), pins)
        if offloads:
            prepare(device_of(model))
        with _explained(checked, model, blocks, state):
            measured = measure(checked, model=model, blocks=blocks, state=state, offloads=offloads)
        flush(device_of(model))
        meter = Meter(model, optimizers, total=budget is not None)
        measured = meter.complete(measured)
        if activation_budget is None:
            nbytes = meter.budget_bytes(budget)
        else:
            nbytes = activation_budget_bytes(activation_budget, plain_bytes=plain_plan(measured.costs).peak_bytes)
        if offloads and plain_plan(measured.costs).peak_bytes > nbytes:
            measured = dataclasses.replace(measured, costs=with_links(measured.costs, device_of(model)))
        trials = _Trials(checked, model, state, meter, measured)
        others = [] if pins else [other for name, other in simple_plans(measured.costs) if name != NOTHING]
        try:
            found = fitted(measured.costs, nbytes, pins, trials.peak_of, others)
        except PlanInfeasibleError as error:
            raise with_cause(error, advice(measured.made_outside, model, blocks, error.smallest_bytes)) from None
        if race and not pins and found.overhead_seconds > 0.0:  # else there is nothing to gain
            found = race_plans(found, simple_plans(measured.costs), trials)
    finally:
        state.put_back()
        flush(device_of(model))
    return trials.with_places(found)


@contextlib.contextmanager
def _explained(
    step: Step, model: torch.nn.Module, blocks: dict[str, torch.nn.Module], state: TrainingState
) -> Iterator[None]:
    """Say of an error about blocks why they did not run; of one about backward, what is known of it."""
    try:
        yield
    except BlocksError as error:
        found = why_not_run(step, model, blocks, state)
        raise BlocksError(f"plan: {found}" if found else f"{error}{step.hint()}") from None


class _Trials:
    """Runs plans."""

    def __init__(
        self,
        step: Callable[[], object],
        model: torch.nn.Module,
        state: TrainingState,
        meter: Meter,
        measured: MeasuredStep,
    ) -> None:
        self._step, self._model, self._state, self._meter, self._measured = step, model, state, meter, measured

    def with_places(self, plan: Plan) -> Plan:
        """Return a plan that knows the model."""
        names = self._measured.names
        facts = facts_of(self._model, names)
        return dataclasses.replace(plan, blocks=names, places=self._measured.places, model=facts)

    def candidate(self, name: str, plan: Plan) -> Candidate:
        """Return a plan as a way to run the step."""
        forwards = forwards_of(self._model, settings_of(self.with_places(plan), self._model))
        return Candidate(name, self._model, forwards, self._step, self._state)

    def peak_of(self, plan: Plan) -> float:
        """Run a plan and return its peak, in bytes."""
        candidate = self.candidate("", plan)
        candidate.run()  # the first run of a structure is audited, which needs more, and moves originals
        flush(device_of(self._model))
        return self._meter.peak_of(candidate.run, self._state)
