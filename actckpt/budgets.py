"""`plan`: the fastest way through a training step within a memory budget, measured and solved for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from actckpt._blocks.applied import find_blocks
from actckpt._blocks.choosing import Blocks, check_model, check_not_meta
from actckpt._budget.budget_config import BudgetConfig, check_budget
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._cycles.plan_step import planned
from actckpt.action import Action
from actckpt.planner.plans import Plan

__all__ = ["plan"]


def plan(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    budget: float | str | None = None,
    activation_budget: float | str | None = None,
    blocks: Blocks | None = None,
    optimizer: Optimizers = None,
    pins: Mapping[Any, Action | str] | None = None,
    race: bool = True,
) -> Plan:
    """Measure a training step and find the fastest plan whose peak fits into a budget.

    `actckpt.apply(model, policy=plan)` then runs it. Model, gradients, optimizer and random state are restored
    afterwards, even if the step raises. No step needs much more memory than one with all blocks checkpointed, or than
    the budget. Plans offload if there is a store: pinned memory for devices; for CPU tensors disk, if
    `configure(spill_dir=...)` or a pin says so.

    Args:
        step: runs forward and backward, without arguments, through each block; may run the optimizer. A block may run
            several times in one forward of the model: the plan has each call.
        model: what the step trains; no part of it is checkpointed.
        budget: maximum of all memory at any moment of a step: bytes as a whole number, a text with a unit (`"24GiB"`),
            a share of the device (`"90%"` or 0.9), or `"auto"`: free memory plus what this process holds, less 5 %. On
            a device everything allocated counts; on a CPU parameters, buffers, gradients, optimizer state and the
            tensors that the step makes.
        activation_budget: instead of `budget`, maximum bytes beyond the memory in use before the step, without
            gradients of
            parameters: bytes, a text with a unit, or a share of what the step needs without actckpt (`"40%"` or 0.4).
        blocks: as in `apply`.
        optimizer: the one that the step runs, if it does; several in a list.
        pins: as in `actckpt.planner.solve`.
        race: time the plan against simple policies that fit (nothing, recompute, offload inputs, offload, keep
            attention,
            keep matmuls), and return the fastest. All give the same gradients. Not with `pins`, which these would
            ignore.
    Returns:
        A plan. Its `blocks` and `places` give the places of its values in the model, its `race` the measurements.
        `explain()`, `table()` and `plot()` show it.
    Raises:
        PlanInfeasibleError: no plan fits. Its `smallest_bytes` is the smallest peak of a plan that was tried.
        BlocksError: there are no such blocks; one does not run, or runs in several forwards of the model or inside
            another one; or the step communicates with other ranks.
        TypeError: `optimizer` is no optimizer.
        ValueError: the budget is invalid, a pin names nothing or is no action, or the step changes parameters and
            `optimizer` is missing.
    Cost: ten to twenty steps, with `race` two dozen more, and a copy of the training state in host memory.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(*(block() for _ in range(6)))
        >>> x = torch.randn(32, 64)
        >>> found = actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="60%", race=False)
        >>> found.peak_bytes <= found.budget_bytes
        True
        >>> actckpt.apply(model, policy=found)
        ('0', '1', '2', '3', '4', '5')
    """
    check_model(model, "plan")
    budget_options = {"budget": budget, "activation_budget": activation_budget, "pins": pins, "race": race}
    check_budget(budget_options, model, "plan")
    check_not_meta(model, "plan")
    optimizers = optimizers_of(optimizer, model, "plan")
    chosen = find_blocks(model, blocks, "plan")
    return planned(step, model, chosen, BudgetConfig.of({**budget_options, "blocks": blocks}, optimizers))
