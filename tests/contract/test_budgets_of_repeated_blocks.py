"""Budgets of models whose blocks run several times in a forward: layers that share weights, and loops."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.utils.checkpoint
from oracle import assert_equal
from peaks import apply_budget, measured, plan_of
from test_budgets import Block
from torch import Tensor, nn
from torch.nn import functional

import actckpt
from actckpt import Action


class Looped(nn.Module):
    """Layers that share one block, as in ALBERT; with two, they take turns."""

    def __init__(self, num_blocks: int = 1, num_calls: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.num_calls = num_calls
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in range(self.num_calls):
            x = self.blocks[number % len(self.blocks)](x)
        return self.head(x)


class NormTwice(Block):
    """A block in which a module runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.silu(self.norm(functional.silu(self.norm(x)))))


def _stacked() -> Looped:
    model = Looped()
    model.blocks = nn.ModuleList(NormTwice() for _ in range(6))
    return model


def _tokens() -> Tensor:
    return torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(0))


def _made(kind: Callable[[], Looped] = Looped) -> Looped:
    torch.manual_seed(0)
    return kind()


def _step(model: nn.Module, tokens: Tensor | None = None) -> tuple[list[Tensor], int]:
    """Return gradients, and the peak."""
    tokens = _tokens() if tokens is None else tokens
    return measured(model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward())


def _planned(model: nn.Module, **options: Any) -> actckpt.Plan:
    tokens = _tokens()  # before the step, whose bytes a plan counts
    return actckpt.plan(lambda: _step(model, tokens), model=model, blocks="blocks.*", race=False, **options)


def _differs(plan: actckpt.Plan) -> bool:
    """Whether calls of one block run differently."""
    stack = zip(plan.blocks or (), plan.actions, plan.rerun, strict=True)
    calls = [(name, tuple(actions.values()), rerun) for name, actions, rerun in stack if name == "blocks.0"]
    return len(set(calls)) > 1


def test_what_the_table_names_is_found_in_every_call() -> None:
    model = _made()
    pinned = "up::aten.addmm.default#0.0"
    pins: dict[Any, str] = {(call, pinned): "recompute" if call == 2 else "keep" for call in range(6)}
    pins["::aten.gelu.default#0.0"] = "recompute"  # so that each call is recorded
    plan = _planned(model, activation_budget="90%", pins=pins)
    assert [*filter(None, plan.blocks or ())] == ["blocks.0"] * 6
    actckpt.apply(model, policy=plan)
    _step(model)
    up = [row for row in actckpt.report(model, group_by="module").rows if row.name == "blocks.0.up"]
    assert [(row.num_values, row.kept_bytes) for row in up] == [(6, 5 * 8 * 32 * 128 * 4)]


def test_values_of_a_module_that_runs_twice_in_a_block_are_told_apart() -> None:
    model = _made(_stacked)
    first, second = (f"norm{call}::aten.native_layer_norm.default#0.0" for call in ("", "@1"))
    plan = _planned(model, activation_budget="90%", pins={first: "keep", second: "recompute"})
    for name, actions in zip(plan.blocks or (), plan.actions, strict=True):
        assert name is None or (actions[first], actions[second]) == (Action.KEEP, Action.RECOMPUTE)


def _applied(share: str = "50%") -> Looped:
    model = _made()
    actckpt.apply(model, policy=_planned(model, activation_budget=share))
    return model


def test_plans_are_saved_and_models_copied(tmp_path: Path) -> None:
    expected, _ = _step(_made())
    model = _made()
    plan = _planned(model, activation_budget="50%")
    assert _differs(plan)
    plan.save(tmp_path / "plan.json")
    actckpt.apply(model, policy=actckpt.Plan.load(tmp_path / "plan.json"))
    _, peak = _step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            gradients, found = _step(other)
            assert_equal(gradients, expected)
        assert found == peak
        actckpt.remove(other)
        assert not other._forward_pre_hooks
    gradients, found = _step(model)
    assert_equal(gradients, expected)
    assert found == peak


def test_each_forward_counts_calls_anew_whatever_happened_in_the_one_before() -> None:
    plain, model = _made(), _applied()
    expected, _ = _step(plain)
    _step(model)
    _, peak = _step(model)

    def without_gradients() -> None:
        with torch.no_grad():
            model(_tokens())

    def failed() -> None:
        calls = iter([None] * 3)
        hook = model.blocks[0].register_forward_pre_hook(lambda *_: next(calls))
        with pytest.raises(StopIteration):
            model(_tokens())
        hook.remove()

    for before in (without_gradients, lambda: model(_tokens()), failed):
        before()
        gradients, found = _step(model)
        assert_equal(gradients, expected)
        assert found == peak
    for each in (model, plain):
        each.blocks[0].register_forward_pre_hook(_look)  # a forward without gradients before each call
    gradients, found = _step(model)
    assert_equal(gradients, _step(plain)[0])
    assert found <= 1.1 * peak


def _look(block: nn.Module, args: tuple[Tensor]) -> None:
    with torch.no_grad():
        block.forward(args[0])


def test_forwards_without_gradients_between_calls_count_for_nothing_in_the_first_step() -> None:
    """Else the plan has calls that are counted in no step after it, and says of others what was for those."""
    model, plain = _made(), _made()
    for each in (model, plain):
        each.blocks[0].register_forward_pre_hook(_look)
    expected, plain_peak = _step(plain)
    actckpt.apply(model, blocks="blocks.*", activation_budget="60%", race=False, on_infeasible="raise")
    num_first = 2 if on_device.device_type == "cpu" else 5
    for number in range(num_first + 2):
        gradients, peak = _step(model)
        assert_equal(gradients, expected)
        is_first = number < num_first  # of all, and of a plan: checksums are taken of what it computes again
        plan = actckpt.report(model).plan
        # The allocator of a device gives out more than storages have, and the percentage is of that.
        assert is_first or peak <= (0.6 * plain_peak if on_device.device_type == "cpu" else plan.budget_bytes)
    assert [*filter(None, plan_of(model).blocks or ())] == ["blocks.0"] * 6


def test_a_first_step_in_which_no_block_runs_with_gradients_is_told() -> None:
    class Reentrant(Looped):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for _ in range(self.num_calls):
                x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=True)
            return self.head(x)

    model = _made(Reentrant)
    expected, _ = _step(model)
    actckpt.apply(model, blocks="blocks.*", activation_budget="60%", on_infeasible="raise")
    with pytest.warns(UserWarning, match=r"none runs with gradients \(in a reentrant checkpoint"):
        gradients, _ = _step(model)
    assert_equal(gradients, expected)
    assert_equal(_step(model)[0], expected)
    assert actckpt.report(model).plan is None


@pytest.mark.parametrize("num_calls", [3, 9])
def test_more_and_fewer_calls_than_planned_have_plain_gradients(num_calls: int) -> None:
    model, plain = _applied(), _made()
    model.num_calls = plain.num_calls = num_calls
    expected, plain_peak = _step(plain)
    is_more = num_calls == 9
    for number in range(2):
        is_told = is_more and number == 0
        with pytest.warns(UserWarning, match="or less often") if is_told else contextlib.nullcontext():
            gradients, peak = _step(model)
        assert_equal(gradients, expected)
    assert peak < plain_peak


def test_several_forwards_that_are_alive_at_once() -> None:
    def step(model: Looped) -> None:
        losses = [model(part).square().mean() for part in _tokens().chunk(2)]
        losses[0].backward(retain_graph=True)
        for loss in losses:
            loss.backward()

    plain, budgeted = _made(), _made()
    expected, _ = measured(plain, lambda: step(plain))
    apply_budget(budgeted, "60%", blocks="blocks.*", race=True)
    for model in (_applied(), budgeted):
        for _ in range(3):
            assert_equal(measured(model, partial(step, model))[0], expected)


@pytest.mark.parametrize("checkpoint", [actckpt.checkpoint, torch.utils.checkpoint.checkpoint])
def test_a_checkpoint_inside_of_the_model_is_one_clear_error_and_one_around_it_is_not(checkpoint: Any) -> None:
    class Checkpointing(Looped):
        is_checkpointing = False

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for number in range(self.num_calls):
                if number == 3 and self.is_checkpointing:
                    x = checkpoint(lambda x: self.blocks[0](self.blocks[0](x)), x, use_reentrant=False)
                else:
                    x = self.blocks[0](x)
            return self.head(x)

    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return checkpoint(self.model, tokens, use_reentrant=False)

    model: Any = _made(Checkpointing)
    expected, _ = _step(model)
    plan = _planned(model, activation_budget="50%")
    assert _differs(plan)
    actckpt.apply(model, policy=plan)
    for _ in range(2):
        assert_equal(_step(Around(model))[0], expected)
    model.is_checkpointing = True
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"Block runs several times.*inside of a checkpoint.*Leave out that"
    ):
        _step(model)
    model.is_checkpointing = False
    assert_equal(_step(model)[0], expected)


def test_a_block_inside_of_another_one_is_one_clear_error() -> None:
    model = _made()
    actckpt.apply(model, blocks=["blocks.0", "blocks.0.up"], activation_budget="60%", on_infeasible="raise")
    message = r"block 'blocks\.0\.up' runs inside of block 'blocks\.0'"
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        model(_tokens())
    actckpt.remove(model)
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        actckpt.plan(lambda: _step(model), model=model, blocks=["blocks.0", "blocks.0.up"], activation_budget="60%")
