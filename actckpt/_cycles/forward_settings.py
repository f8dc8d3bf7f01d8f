"""A cycle's plan as settings of blocks, one part per forward of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from actckpt._blocks.applied import OneCall, Settings
from actckpt._budget.running import RECOMPUTE, settings_of
from actckpt._cycles.timeline import Call
from actckpt.planner.plans import Plan

__all__ = ["settings_per_forward"]


def settings_per_forward(
    plan: Plan, calls: Sequence[Call], num_forwards: int, model: torch.nn.Module, *, unknown: Collection[int]
) -> list[Mapping[str, Settings]]:
    """Return how blocks run in each forward of a cycle.

    Args:
        calls: the block calls of the plan.
        unknown: numbers of calls that the plan does not cover; these recompute everything.
    """
    assert plan.blocks is not None and plan.places is not None
    per_forward: list[Mapping[str, Settings]] = []
    for number in range(num_forwards):
        own = [at for at, call in enumerate(calls) if call.forward == number]
        part = dataclasses.replace(
            plan,
            actions=tuple(plan.actions[at] for at in own),
            rerun=tuple(plan.rerun[at] for at in own),
            blocks=tuple(plan.blocks[at] for at in own),
            places=tuple(plan.places[at] for at in own),
            windows=None if plan.windows is None else tuple(plan.windows[at] for at in own),
            costs=dataclasses.replace(plan.costs, stack=tuple(plan.costs.stack[at] for at in own), segments=None),
        )
        settings = settings_of(part, model)
        for at in set(unknown).intersection(own):
            same = [other for other in own if plan.blocks[other] == plan.blocks[at]]
            settings = _with_call(settings, calls[at].block, same.index(at), RECOMPUTE)
        per_forward.append(settings)
    return per_forward


def _with_call(settings: dict[str, Settings], name: str, number: int, one: OneCall) -> dict[str, Settings]:
    """Return `settings` with other settings for one call of a block."""
    before = settings[name]
    changed = (*before[:number], one, *before[number + 1 :]) if isinstance(before, tuple) else one
    return {**settings, name: changed}
