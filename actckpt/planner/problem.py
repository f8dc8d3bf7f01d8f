"""A cost table with a budget and pins: what may be chosen, and what a choice comes to."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, CostTable
from actckpt.planner.pins import Allowed, Pins, allowed_actions, checked_pins
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import simulate

__all__ = ["Choice", "Problem", "played"]


class Choice(NamedTuple):
    """What becomes of the values of each entry of the stack, by name, and whether it is run again as a whole."""

    actions: tuple[Mapping[str, Action], ...]
    rerun: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the solver works on."""

    costs: CostTable
    budget_bytes: float
    #: Per entry of the stack.
    allowed: tuple[Allowed, ...]

    @classmethod
    def of(cls, costs: CostTable, budget_bytes: float, pins: Pins | None = None) -> Problem:
        """Lay out a cost table.

        Raises:
            ValueError: a pin names nothing, cannot be, or contradicts another.
        """
        return cls(costs, budget_bytes, allowed_actions(costs, checked_pins(pins)))

    @functools.cached_property
    def scale_s(self) -> float:
        """Seconds of the order of a step's, to tell times from rounding."""
        recompute_s = sum(value.recompute_s for block in self.costs.blocks for value in block.values)
        return self.costs.plain_seconds or recompute_s or 1.0

    def kept(self) -> Choice:
        """Return the choice that keeps each value, unless a pin says otherwise."""
        actions = tuple({name: may[0] for name, may in allowed.items()} for allowed in self.allowed)
        return Choice(actions, (False,) * len(actions))

    def plan(self, choice: Choice) -> Plan | None:
        """Return the plan of a choice; None where it does not fit, or backward lacks something.

        What backward does not need, and nothing is computed from, is dropped.
        """
        actions, offloaded_bytes = [], 0.0
        for block, chosen, rerun, allowed in zip(self.costs.blocks, *choice, self.allowed, strict=True):
            if block.lost(chosen, rerun=rerun):
                return None
            again = block.recomputed(chosen, rerun=rerun)
            read = {name for value in again for name in value.inputs}
            read |= {BLOCK_INPUT} if rerun else {value.name for value in block.values if value.needed}
            unread = {name for name, may in allowed.items() if Action.RECOMPUTE in may} - read
            actions.append({name: Action.RECOMPUTE if name in unread else each for name, each in chosen.items()})
            offloaded_bytes += block.bytes_of(actions[-1], Action.OFFLOAD)
        return played(
            Plan(
                budget_bytes=self.budget_bytes,
                actions=tuple(actions),
                rerun=choice.rerun,
                plain_seconds=self.costs.plain_seconds,
                max_inflight=math.ceil(offloaded_bytes),
                costs=self.costs,
                recompute_seconds=0.0,
                write_wait_seconds=0.0,
                read_wait_seconds=0.0,
                bound_seconds=0.0,
                peak_bytes=0.0,
            )
        )


#: What playing a plan through says.
_PLAYED = ("recompute_seconds", "write_wait_seconds", "read_wait_seconds", "peak_bytes")


def played(plan: Plan) -> Plan | None:
    """Return a plan with what playing it through comes to; None where it does not fit."""
    step = simulate(plan.costs, plan)
    return dataclasses.replace(plan, **{name: getattr(step, name) for name in _PLAYED}) if step.fits else None
