"""Plans that take turns in the steps of a training."""

from __future__ import annotations

import dataclasses
import statistics

import torch

from actckpt._core import devices
from actckpt._core.devices import Moment
from actckpt.planner.plans import Plan, Raced

__all__ = ["NUM_STEPS", "Race", "Turn", "entries_of"]

#: Steps of each plan; the first warms up.
NUM_STEPS = 6
#: A plan that is predicted to be faster than simple choices by this share of the step does not race: on a CPU, and on a
#: device. There what the host takes hides behind what the device does, or not: of a ViT with small blocks on an H200,
#: plans added 1.4 to 5 times what they were predicted to (docs/gpu.md).
_SURE_ON_CPU, _SURE_ON_DEVICE = 0.03, 0.1


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
        #: Whose turn it is; None: nobody's.
        self._at: int | None = None
        self._began: Moment = 0.0
        self.is_over = False

    def next(self) -> Plan:
        """Return the plan that runs next, or the one that has won."""
        if not self._is_run():
            return self._take_turn()
        self.is_over = True
        return self._winner(self._medians())

    def winner(self) -> Plan | None:
        """Return the plan that has won; None: not known yet."""
        return self._winner(self._medians()) if self._is_run() else None

    @property
    def steps_left(self) -> int:
        """How many steps it still takes."""
        return sum(max(0, NUM_STEPS - len(each)) for each in self._steps)

    def turn(self) -> Turn | None:
        """Return the step that runs now; None: it is in no race."""
        return None if self._at is None else Turn(self._began, self._steps[self._at], self._device)

    def _is_run(self) -> bool:
        return self.steps_left == 0 and all(devices.has_passed(end) for steps in self._steps for _, end in steps)

    def _take_turn(self) -> Plan:
        self._at = min(range(len(self._entries)), key=lambda at: len(self._steps[at]))
        self._began = devices.moment(self._device)
        return self._entries[self._at][1]

    def _medians(self) -> list[float]:
        """Return the seconds of a step of each plan; without the first."""
        return [statistics.median(devices.seconds_between(*step) for step in each[1:]) for each in self._steps]

    def _winner(self, seconds: list[float]) -> Plan:
        """Return the fastest, with what was measured."""
        rows = tuple(
            Raced(name, plan.peak_bytes, fits=True, seconds=each, ratio=each / seconds[0])
            for (name, plan), each in zip(self._entries, seconds, strict=True)
        )
        best = min(range(len(seconds)), key=seconds.__getitem__)
        name, plan = self._entries[best]
        return dataclasses.replace(plan, race=rows, chosen=name)


def _alike(plan: Plan, other: Plan, nbytes: float) -> Plan:
    """Return a simple choice as a plan for the model and the budget of another one, whose bound is that of both."""
    bound = min(plan.bound_seconds, other.overhead_seconds)
    known = dataclasses.replace(other, blocks=plan.blocks, places=plan.places, model=plan.model)
    return dataclasses.replace(known, budget_bytes=nbytes, bound_seconds=bound)


def entries_of(plan: Plan, nbytes: float, device: torch.device) -> list[tuple[str, Plan]]:
    """Return a plan and the simple choices that fit into so many bytes, with their names; it alone if its gain is sure.

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
    sure = _SURE_ON_CPU if is_on_cpu else _SURE_ON_DEVICE
    is_sure = best - plan.overhead_seconds >= sure * plan.plain_seconds
    return [("plan", plan), *([] if is_sure or plan.overhead_seconds == 0.0 else others)]
