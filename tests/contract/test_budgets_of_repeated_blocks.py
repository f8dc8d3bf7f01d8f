"""Budgets of models whose blocks run several times in a forward: layers that share weights, and loops."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.utils.checkpoint
from peaks import Twins, apply_budget, measured, seeded
from test_budgets import Block
from torch import Tensor, nn
from torch.nn import functional

import actckpt
from actckpt import Action


class Looped(nn.Module):
    """Layers that share one block, as in ALBERT."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.num_calls = 6

    def call(self, number: int, x: Tensor) -> Tensor:
        """Run a block; subclasses do it in other ways."""
        return self.blocks[number % len(self.blocks)](x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in range(self.num_calls):
            x = self.call(number, x)
        return self.head(x)


class NormTwice(Block):
    """A block in which a module runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.silu(self.norm(functional.silu(self.norm(x)))))


def _tokens() -> Tensor:
    return torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(0))


#: What the first linear layer of a block makes.
_UP = "up::aten.addmm.default#0.0"


@pytest.fixture
def step() -> Callable[[nn.Module], None]:
    tokens = _tokens()  # before the step, whose bytes a plan counts
    return lambda model: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


#: By which calls of one block run differently, however long their operators take.
_PINS: dict[Any, str] = {(call, _UP): "keep" if call % 2 else "recompute" for call in range(6)}


def _planned(model: nn.Module, step: Any, pins: dict[Any, str] = _PINS) -> actckpt.Plan:
    run = lambda: measured(model, lambda: step(model))  # noqa: E731
    return actckpt.plan(run, model=model, blocks="blocks.*", race=False, activation_budget="90%", pins=pins)


def _applied(step: Any, make: Callable[[], nn.Module] = Looped) -> Any:
    """Return a model with a plan by which calls of its block run differently, and a plain one."""
    twins = Twins(make)
    actckpt.apply(twins.model, policy=_planned(twins.model, step))
    return twins


def test_what_the_table_names_is_found_in_every_call(step: Any) -> None:
    model = seeded(Looped)
    plan = _planned(model, step, _PINS | {"::aten.gelu.default#0.0": "recompute"})  # so that each call is recorded
    assert [*filter(None, plan.blocks or ())] == ["blocks.0"] * 6
    actckpt.apply(model, policy=plan)
    step(model)
    up = [row for row in actckpt.report(model, group_by="module").rows if row.name == "blocks.0.up"]
    assert [(row.num_values, row.kept_bytes) for row in up] == [(6, 3 * 8 * 32 * 128 * 4)]


def test_values_of_a_module_that_runs_twice_in_a_block_are_told_apart(step: Any) -> None:
    first, second = (f"norm{call}::aten.native_layer_norm.default#0.0" for call in ("", "@1"))
    plan = _planned(Looped(NormTwice, 6), step, {first: "keep", second: "recompute"})
    for name, actions in zip(plan.blocks or (), plan.actions, strict=True):
        assert name is None or (actions[first], actions[second]) == (Action.KEEP, Action.RECOMPUTE)


def test_plans_are_saved_and_models_copied(step: Any, tmp_path: Path) -> None:
    twins = Twins(Looped)
    _planned(twins.model, step).save(tmp_path / "plan.json")
    actckpt.apply(twins.model, policy=actckpt.Plan.load(tmp_path / "plan.json"))
    original, peak = twins.model, twins.step(step)
    for twins.model in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)), original):
        assert twins.step(step, 2) == peak
        actckpt.remove(twins.model)
        assert not twins.model._forward_pre_hooks


def _look(block: nn.Module, args: tuple[Tensor]) -> None:
    with torch.no_grad():
        block.forward(args[0])


def test_each_forward_counts_calls_anew_whatever_happened_in_the_one_before(step: Any) -> None:
    twins = _applied(step)
    model, peak = twins.model, twins.step(step, 2)

    def without_gradients() -> None:
        with torch.no_grad():
            model(_tokens())

    def failed() -> None:
        calls = iter([None] * 3)
        hook = model.blocks[0].register_forward_pre_hook(lambda *_: next(calls))
        with pytest.raises(StopIteration):
            model(_tokens())
        hook.remove()

    def several() -> None:
        for loss in [model(part).square().mean() for part in _tokens().chunk(2)]:
            loss.backward()

    for before in (without_gradients, lambda: model(_tokens()), failed, several):
        before()
        assert twins.step(step) == peak
    for each in (model, twins.plain):
        each.blocks[0].register_forward_pre_hook(_look)  # a forward without gradients before each call
    assert twins.step(step) <= 1.1 * peak


def test_forwards_without_gradients_between_calls_count_for_nothing_in_the_first_step(step: Any) -> None:
    """Else the plan has calls that are counted in no step after it, and says of others what was for those."""
    twins = Twins(Looped)
    for each in (twins.model, twins.plain):
        each.blocks[0].register_forward_pre_hook(_look)
    apply_budget(twins.model, "60%", blocks="blocks.*")
    # In the first steps without and with the plan, audits compute checksums of recomputed values.
    twins.step(step, 2 if on_device.device_type == "cpu" else 5)
    for _ in range(2):
        peak = twins.step(step)
        # The allocator of a device gives out more than storages have, and the percentage is of that.
        assert peak <= (0.6 * twins.plain_peak if on_device.device_type == "cpu" else twins.plan.budget_bytes)
    assert [*filter(None, twins.plan.blocks or ())] == ["blocks.0"] * 6


def test_a_first_step_in_which_no_block_runs_with_gradients_is_told(step: Any) -> None:
    class Reentrant(Looped):
        def call(self, number: int, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=True)

    twins = Twins(Reentrant, "60%", blocks="blocks.*")
    with pytest.warns(UserWarning, match=r"none runs with gradients \(in a reentrant checkpoint"):
        twins.step(step)
    twins.step(step)
    assert actckpt.report(twins.model).plan is None


@pytest.mark.parametrize("num_calls", [3, 9])
def test_more_and_fewer_calls_than_planned_have_plain_gradients(num_calls: int, step: Any) -> None:
    twins = _applied(step)
    twins.model.num_calls = twins.plain.num_calls = num_calls
    with pytest.warns(UserWarning, match="or less often") if num_calls == 9 else contextlib.nullcontext():
        twins.step(step)
    assert twins.step(step) < twins.plain_peak


@pytest.mark.parametrize("budget", [None, "60%"])
def test_several_forwards_that_are_alive_at_once(budget: str | None, step: Any) -> None:
    def several(model: nn.Module) -> None:
        losses = [model(part).square().mean() for part in _tokens().chunk(2)]
        losses[0].backward(retain_graph=True)
        for loss in losses:
            loss.backward()

    twins = _applied(step) if budget is None else Twins(Looped, budget, blocks="blocks.*", race=True)
    twins.step(several, 3)


@pytest.mark.parametrize("checkpoint", [actckpt.checkpoint, torch.utils.checkpoint.checkpoint])
def test_a_checkpoint_inside_of_the_model_is_one_clear_error_and_one_around_it_is_not(
    checkpoint: Any, step: Any
) -> None:
    class Checkpointing(Looped):
        is_checkpointing = False

        def call(self, number: int, x: Tensor) -> Tensor:
            is_inside = self.is_checkpointing and number == 3
            return checkpoint(self.blocks[0], x, use_reentrant=False) if is_inside else super().call(number, x)

    twins = _applied(step, Checkpointing)
    model = twins.model
    around = nn.Module()
    around.model = model
    around.forward = lambda tokens: checkpoint(model, tokens, use_reentrant=False)
    twins.model = around
    twins.step(step, 2)
    model.is_checkpointing = True
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"Block runs several times.*inside of a checkpoint.*Leave out that"
    ):
        step(model)
    model.is_checkpointing, twins.model = False, model
    twins.step(step)


def test_a_block_inside_of_another_one_is_one_clear_error(step: Any) -> None:
    model = seeded(Looped)
    blocks = ["blocks.0", "blocks.0.up"]
    actckpt.apply(model, blocks=blocks, activation_budget="60%", on_infeasible="raise")
    message = r"block 'blocks\.0\.up' runs inside of block 'blocks\.0'"
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        model(_tokens())
    actckpt.remove(model)
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        actckpt.plan(lambda: step(model), model=model, blocks=blocks, activation_budget="60%")
