"""Plans that take turns in the steps of a training."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from actckpt._core import devices
from actckpt._core.devices import Moment
from actckpt.planner.plans import Plan, Raced

__all__ = ["Race", "Turn", "race_of"]

_ROUNDS = 5
#: A plan that is predicted to be faster than simple choices by this share of the step does not race.
_SURE = 0.03


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a race."""

    began: Moment
    #: Steps of the plan that runs in it, from where to where each went.
    steps: list[tuple[Moment, Moment]]
    device: torch.device

    def end(self) -> None:
        """The step has ended: all its work is in the current stream of the device."""
        self.steps.append((self.began, devices.moment(self.device)))


class Race:
    """Plans that take turns in real steps. Nothing waits for a device: its steps are timed once they are over."""

    def __init__(self, entries: list[tuple[str, Plan]], device: torch.device) -> None:
        self._entries = entries
        self._device = device
        self._steps: list[list[tuple[Moment, Moment]]] = [[] for _ in entries]
        self._at = 0
        self._began: Moment = 0.0
        self.is_over = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": [[] for _ in self._entries], "_began": 0.0}  # a copy runs a race of its own

    def next(self) -> Plan:
        """Return the plan that runs next, or the one that has won."""
        if self.steps_left == 0 and all(devices.has_passed(end) for steps in self._steps for _, end in steps):
            self.is_over = True
            return self._winner()
        self._at = min(range(len(self._entries)), key=lambda at: len(self._steps[at]))
        self._began = devices.moment(self._device)
        return self._entries[self._at][1]

    @property
    def steps_left(self) -> int:
        """How many steps it still takes."""
        return sum(max(0, _ROUNDS + 1 - len(each)) for each in self._steps)

    def turn(self) -> Turn:
        """Return the step that runs now."""
        return Turn(self._began, self._steps[self._at], self._device)

    def _winner(self) -> Plan:
        medians = [  # the first of each warms up
            statistics.median(devices.seconds_between(*step) for step in each[1:]) for each in self._steps
        ]
        rows = tuple(
            Raced(name, plan.peak_bytes, fits=True, seconds=seconds, ratio=seconds / medians[0])
            for (name, plan), seconds in zip(self._entries, medians, strict=True)
        )
        best = min(range(len(medians)), key=medians.__getitem__)
        name, plan = self._entries[best]
        return dataclasses.replace(plan, race=rows, chosen=name)


def _alike(plan: Plan, other: Plan, nbytes: float) -> Plan:
    """Return a simple choice as a plan for the model and the budget of another one, whose bound is that of both."""
    bound = min(plan.bound_seconds, other.overhead_seconds)
    known = dataclasses.replace(other, blocks=plan.blocks, places=plan.places, model=plan.model)
    return dataclasses.replace(known, budget_bytes=nbytes, bound_seconds=bound)


def race_of(plan: Plan, nbytes: float, device: torch.device) -> Race | None:
    """Return the race of a plan against simple choices that fit into so many bytes; None where its gain is sure.

    Those that offload do not take part on a device: where its link is slow, so is each of their steps.
    """
    from actckpt._budget.simple import NOTHING, simple_plans  # with the solver: half a second to import

    is_on_cpu = device.type == "cpu"
    others = [
        (name, _alike(plan, other, nbytes))
        for name, other in simple_plans(plan.costs)
        if name != NOTHING and other.peak_bytes <= nbytes and (is_on_cpu or other.windows is None)
    ]
    best = min((other.overhead_seconds for _, other in others), default=float("inf"))
    is_sure = best - plan.overhead_seconds >= _SURE * plan.plain_seconds
    return None if is_sure or plan.overhead_seconds == 0.0 else Race([("plan", plan), *others], device)
