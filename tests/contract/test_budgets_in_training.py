"""`apply(budget=...)`: a plan is made while the model trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import on_device
import pytest
import torch
from oracle import assert_equal
from peaks import Twins, apply_budget, measured, plan_of
from test_budgets import Model, Training
from torch import Tensor, nn
from torch.nn import functional

import actckpt


def _steps(training: Training, num: int) -> Iterator[tuple[list[Tensor], int]]:
    """Yield gradients and peak of each step."""
    return (measured(training.model, training.step) for _ in range(num))


def _budgeted(budget: float | str = "60%") -> Training:
    training = Training()
    actckpt.apply(training.model, activation_budget=budget, on_infeasible="raise")
    return training


def test_the_race_runs_in_real_steps_and_its_winner_stays() -> None:
    ((expected, _),) = _steps(Training(), 1)
    training = _budgeted()
    plans, left = [], []
    for gradients, _ in _steps(training, 60):
        assert_equal(gradients, expected)
        found = actckpt.report(training.model)
        assert (found.race_steps_left is None) == (found.plan is None)
        assert bool(found.race_steps_left) == (f"the next {found.race_steps_left} steps run this plan" in str(found))
        if found.plan is not None and not found.note.startswith("No step of this plan"):  # it was corrected
            assert "a step of the plan" in found.note and found.rows, "a step of a candidate is shown"
            assert sum(row.num_blocks for row in found.rows if row.name == "(rerun)") == sum(found.plan.rerun)
        plans.append(found.plan)
        left.append(found.race_steps_left or 0)
    final = plans[-1]
    assert "a step of the plan" in found.note
    rows = {row.name: row for row in final.race}
    if on_device.device_type != "cpu" and final.overhead_seconds == 0.0:
        pytest.skip("what this plan does takes no time on this device, or is hidden, and then nothing races")
    assert {"plan", "recompute"} <= set(rows), final
    times = {name: row.seconds for name, row in rows.items() if row.seconds is not None}
    assert final.chosen in times  # unit/cycles/test_trials.py says which one
    assert rows["plan"].ratio == 1.0
    raced = [plan for plan, num in zip(plans, left, strict=True) if num and not plan.race]
    assert all(plan is raced[0] for plan in raced), "a candidate was shown"
    assert all(plan is final for plan in plans[-3:])
    if on_device.device_type == "cpu":  # slower candidates leave early
        trials = left[next(at for at, num in enumerate(left) if num) :]
        assert trials == sorted(trials, reverse=True) and left[0] == left[-1] == 0
        return
    # The first step has no plan; then one race step after another, until none is left.
    num_steps = 6 * len(rows)
    assert left == [0, *range(num_steps - 1, -1, -1), *[0] * (59 - num_steps)]


def test_a_model_that_is_never_called_itself_is_told_and_its_part_that_is_called_has_a_plan() -> None:
    wrapped, x = nn.Module(), torch.randint(16, (8, 32))
    wrapped.net = Training().model
    actckpt.apply(wrapped, activation_budget="60%", on_infeasible="raise")
    with pytest.warns(UserWarning, match=r"Module itself was not called.*the part of Module.*Shown once") as told:
        with torch.no_grad(), contextlib.suppress(NotImplementedError):
            wrapped(x)  # is no step
        for _ in range(2):
            wrapped.net(x).square().mean().backward()
    assert len(told) == 1
    assert actckpt.report(wrapped).plan is None
    actckpt.remove(wrapped)
    actckpt.apply(wrapped.net, activation_budget="60%", on_infeasible="raise")
    for _ in range(2):  # without a warning
        wrapped.net(x).square().mean().backward()
    assert actckpt.report(wrapped).plan is not None


def test_forwards_without_gradients_use_up_no_step() -> None:
    training = _budgeted()
    for _ in range(3):
        with torch.no_grad():
            training.model(training.tokens)
        training.model.eval()
        with torch.inference_mode():
            training.model(training.tokens)
        training.model.train()
    assert actckpt.report(training.model).plan is None
    list(_steps(training, 2))
    assert actckpt.report(training.model).plan is not None


def test_forwards_without_backward_and_outputs_without_gradient_hold_up_no_plan() -> None:
    class Several(Model):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            result = super().forward(tokens)
            return result.square(), functional.cross_entropy(result.flatten(0, 1), tokens.flatten())

    tokens, twins = torch.randint(16, (8, 32)), Twins(Several, 2**22)

    def step(model: nn.Module) -> None:
        for _ in range(2):
            model(tokens)  # its result is dropped
        model(tokens)[1].backward()

    budgets = []
    for _ in range(4):
        twins.step(step)
        plan = actckpt.report(twins.model).plan
        budgets.append(None if plan is None else plan.budget_bytes)
    assert budgets == [None, 2**22, 2**22, 2**22]  # for this model alone


def test_a_second_thread_in_the_first_forward_is_one_clear_error() -> None:
    ((expected, _),) = _steps(Training(), 1)
    training = _budgeted()
    raised: list[BaseException] = []

    def other_call() -> None:
        try:
            training.model(training.tokens)
        except actckpt.errors.BlocksError as error:
            raised.append(error)

    def call_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=other_call)
        thread.start()
        thread.join()

    hook = training.model.norm.register_forward_pre_hook(call_elsewhere)
    training.step()
    hook.remove()
    assert len(raised) == 1 and "in two threads at once" in str(raised[0])
    for gradients, _ in _steps(training, 3):
        assert_equal(gradients, expected)


def test_forwards_that_are_alive_together_only_later_share_a_percentage_from_then_on() -> None:
    """Pipelines call a stage once to learn its shapes."""
    training = Training()
    model, tokens = training.model, training.tokens
    ((_, plain),) = _steps(training, 1)
    actckpt.apply(model, activation_budget="70%", race=False, on_infeasible="raise")

    def step(num_alive: int) -> None:
        for loss in [model(tokens).float().square().mean() for _ in range(num_alive)]:
            loss.backward()

    for num_alive in (1, 1, 2, 2, 2, 2, 2):
        _, peak = measured(model, partial(step, num_alive))
    plan = plan_of(model)
    if on_device.device_type != "cpu":  # a plan is one of each forward
        assert plan.budget_bytes == pytest.approx(0.98 * 0.7 * plain, rel=0.02)
        return
    assert peak <= plan.budget_bytes <= 1.41 * plain


def test_frozen_blocks_before_all_that_is_trained_hold_nothing() -> None:
    def frozen() -> nn.Module:
        model = Model().requires_grad_(False)
        model.head.requires_grad_(True)
        model.norm.eval()
        return model

    tokens, twins = torch.randint(16, (8, 32)), Twins(frozen, "100%", race=True)
    twins.step(lambda model: model(tokens).square().mean().backward(), 3)
    assert twins.plan.overhead_seconds == 0.0
    inputs = [block.values[0].nbytes for block in twins.plan.costs.blocks if block.values]
    assert inputs == [0] * len(inputs), "a block is planned to hold its input"


def test_a_block_that_cannot_run_again_is_one_clear_error() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.tokens = nn.Linear(4, 4), iter(range(1))

        def forward(self, x: Tensor) -> Tensor:
            next(self.tokens)
            return self.layer(x)

    model = nn.Sequential(Once(), Once())
    actckpt.apply(model, blocks=Once, activation_budget="90%", on_infeasible="raise")
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"block '0' ran in the step, but not once more on its own.*StopIter"
    ):
        model(torch.randn(2, 4))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_nothing_that_was_saved_is_unpacked_to_see_what_backward_needs() -> None:
    training = _budgeted("90%")
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = training.model(training.tokens).square().mean()
        assert not unpacked
    loss.backward()
    assert unpacked


class InFourParts(nn.Module):
    """Where matmuls are kept, backward replays one of four parts at a time; else all of them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = linear(functional.silu(norm(y)).sin().cos())
        return x + y


def test_a_simple_policy_that_fits_by_measurement_is_tried() -> None:
    x = torch.randn(512, 32)
    twins = Twins(lambda: nn.Sequential(*(InFourParts() for _ in range(8))))

    def step(model: nn.Module) -> None:
        model(x).square().mean().backward()

    peaks = []
    for policy in ("matmuls", "recompute"):
        actckpt.apply(twins.model, policy=policy)
        peaks += [twins.step(step) for _ in range(2)]
        actckpt.remove(twins.model)
    budget_bytes = int(1.03 * max(peaks))
    apply_budget(twins.model, budget_bytes, race=True)
    for number in range(60):
        # Where values can be offloaded, the second one measures the link.
        assert twins.step(step) <= budget_bytes or number < 2
        plan = actckpt.report(twins.model).plan
        if plan is not None and plan.race:
            break
    if on_device.device_type != "cpu" and not twins.plan.race:
        pytest.skip("replays take no time on the simulated device, so the plan needs no trials")
    rows = {row.name: row for row in twins.plan.race}
    assert rows["keep matmuls"].fits and rows["keep matmuls"].seconds is not None, rows
    assert rows["keep matmuls"].peak_bytes <= budget_bytes and not rows["keep everything"].fits
