"""Plans for tensors of the CPU use the disk where a folder was configured, or a pin says so, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Configured, Net, chain
from peaks import Step, Twins, apply_budget
from torch import nn

import actckpt
from actckpt import Action

_WIDTH, _BATCH = 64, 256
#: What the first linear layer of a block makes.
_HIDDEN = "up::aten.addmm.default#0.0"


pytestmark = pytest.mark.usefixtures("small_tensors")


def _model() -> nn.Module:
    run = lambda net, x: net.head(chain(net, x))  # noqa: E731
    return Net(run, [Configured(_WIDTH) for _ in range(6)], head=nn.Linear(_WIDTH, 1))


def _step(rows: int = _BATCH) -> Step:
    x = torch.randn(rows, _WIDTH)
    return lambda model: model(x).square().mean().backward()


def _train(budget: str, num_steps: int = 3, **options: Any) -> tuple[actckpt.Plan, int]:
    """Train under a budget, with the gradients of plain training; return the plan of one step, and what it offloads."""
    twins, step, plans = Twins(_model, budget, race=True, on_infeasible="warn", **options), _step(), []
    twins.step(step, num_steps)
    actckpt.reset_stats()
    hook = twins.model.register_forward_hook(lambda *_: plans.append(actckpt.report(twins.model).plan))
    twins.step(step)
    hook.remove()
    (plan,) = plans  # a cycle begins and ends with corrections of the plan
    return plan, actckpt.stats().offloaded_bytes


def _planned_bytes(plan: actckpt.Plan) -> float:
    stack = zip(plan.costs.blocks, plan.actions, strict=True)
    return sum(v.nbytes for block, actions in stack for v in block.values if actions[v.name] is Action.OFFLOAD)


@pytest.mark.parametrize("limit", [None, 2 << 10], ids=["no folder", "less room than one piece"])
def test_without_a_folder_or_room_nothing_goes_to_disk(limit: int | None, tmp_path: Path) -> None:
    if limit is not None:
        actckpt.configure(spill_dir=tmp_path, disk_limit=limit)
    plan, offloaded = _train("50%")
    assert (plan.costs.d2h_bytes_per_s, plan.costs.h2d_bytes_per_s, offloaded) == (0, 0, 0)
    assert _planned_bytes(plan) == 0 < plan.overhead_seconds


def test_with_a_folder_plans_know_how_fast_it_is(tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path, disk_limit="64MiB")
    plan, _ = _train("100%")
    assert plan.costs.d2h_bytes_per_s > 1e6 and plan.costs.h2d_bytes_per_s > 1e6
    assert plan.costs.host_bytes == 64 << 20


def test_what_is_offloaded_is_what_the_plan_says(tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path, disk_limit="64MiB")
    plan, offloaded = _train("50%", 60)  # the race is over by then
    assert offloaded == _planned_bytes(plan)


def test_a_pin_is_enough() -> None:
    plan, offloaded = _train("60%", pins={_HIDDEN: "offload"})
    assert offloaded == _planned_bytes(plan) >= 6 * _BATCH * 4 * _WIDTH * 4
    assert not any(plan.rerun), "a rerun would make what is pinned again"


def test_what_fits_needs_no_action_where_there_is_a_store(tmp_path: Path) -> None:
    """A ReLU saves what its block returns, which is the next block's input: one storage, counted once."""
    actckpt.configure(spill_dir=tmp_path)

    def model() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(6))
        return nn.Sequential(*blocks, nn.Linear(_WIDTH, 1))

    twins, step = Twins(model), _step(rows=2**13)  # results of 2 MiB: smaller ones stay
    twins.step(step)
    apply_budget(twins.model, 1.08 * twins.plain_peak, on_infeasible="warn")
    assert twins.step(step, 3) <= twins.plain_peak
    assert twins.plan.overhead_seconds == 0.0
    assert twins.plan.peak_bytes <= 1.06 * twins.plain_peak or on_device.device_type != "cpu"
