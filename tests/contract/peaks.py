"""Peaks as budgets count them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import on_device
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt.memory import LiveStorages

__all__ = [
    *("Peak", "Step", "Twins", "apply_budget", "bounds", "counted", "measured", "plan_of", "seeded", "smallest_budget"),
    "sum_of_small_gradients",
]

#: Runs forward and backward of a model.
Step = Callable[[nn.Module], object]


class Peak:
    """Most bytes while a block of code ran."""

    peak_bytes = 0


@contextmanager
def counted(model: nn.Module, *, total: bool, held: Iterable[Tensor] = ()) -> Iterator[Peak]:
    """Count what the block makes, as a budget of activations does, or all that there is, as one of all memory does.

    Args:
        held: of what counts toward all memory, what is there before and does not go; a device's allocator counts it.
    """
    found = Peak()
    if total and on_device.device_type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        yield found
        found.peak_bytes = torch.accelerator.max_memory_allocated()
        return
    with LiveStorages(parameters=() if total else model.parameters()) as live:
        yield found
    found.peak_bytes = live.peak_bytes + (sum(tensor.nbytes for tensor in held) if total else 0)


def measured(model: nn.Module, run: Callable[[], object]) -> tuple[list[Tensor], int]:
    """Run a step without gradients before it, from one seed; return its gradients and the peak of activations."""
    torch.manual_seed(1)
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        run()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], live.peak_bytes


def apply_budget(model: nn.Module, budget: float | str, **options: Any) -> None:
    """Give activations a budget that no trials follow and that raises where it is too small."""
    budget = budget if isinstance(budget, str) else int(budget)
    actckpt.apply(model, activation_budget=budget, **{"race": False, "on_infeasible": "raise", **options})


def plan_of(model: nn.Module) -> actckpt.Plan:
    """Return the plan that a model with a budget has."""
    plan = actckpt.report(model).plan
    assert plan is not None
    return plan


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, the same one each time."""
    torch.manual_seed(0)
    return make()


class Twins:
    """A model with a budget, and one without that each step must give the same gradients.

    Args:
        make: makes a model.
        budget: of activations; without one, a test applies something to `model`.
        options: of `apply_budget`.
    """

    plain_peak = 0  #: Of the last step without a budget.

    def __init__(self, make: Callable[[], nn.Module], budget: float | str | None = None, **options: Any) -> None:
        self.plain, self.model = seeded(make), seeded(make)
        if budget is not None:
            apply_budget(self.model, budget, **options)

    def step(self, run: Step, num: int = 1) -> int:
        """Run some steps of both models, and compare gradients; return the peak of the last one under the budget."""
        for _ in range(num):
            expected, self.plain_peak = measured(self.plain, partial(run, self.plain))
            found, peak = measured(self.model, partial(run, self.model))
            assert_equal(found, expected)
        return peak

    @property
    def plan(self) -> actckpt.Plan:
        """The plan of the model."""
        return plan_of(self.model)


def bounds(make: Callable[[], nn.Module], run: Step, blocks: Any = "blocks.*") -> tuple[int, int]:
    """Return the peaks of a step with all blocks checkpointed, and of a plain one."""
    twins = Twins(make)
    actckpt.apply(twins.model, blocks=blocks)
    return twins.step(run, 2), twins.plain_peak


def smallest_budget(train: Callable[[], object]) -> int:
    """Return the smallest budget, as the error for one that is too small tells it. Holds no tensor by a traceback."""
    try:
        train()
    except actckpt.errors.PlanInfeasibleError as error:
        assert error.smallest_bytes is not None
        return int(error.smallest_bytes)
    raise AssertionError("the budget was enough")


def sum_of_small_gradients(weights: list[Tensor], x: Tensor) -> Tensor:
    """Return a sum whose backward has no large gradients: its peak is that of saved tensors."""
    total = torch.zeros(())
    for weight in weights:
        x = (x * weight.detach()).sin()
        total = total + (x.exp() * weight).sum()
    return total
