"""Budgets where cycles change: other sizes, several forwards, retained graphs, autocast, random depth, threads."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Configured, Net, chain
from oracle import assert_equal, gradients, in_threads
from peaks import Step, Twins, apply_budget, bounds, measured, plan_of, seeded, smallest_budget
from residual_mlp import Mlp, Scores
from test_budgets import Training
from torch import Tensor, nn
from torch.nn import functional

import actckpt

_WIDTH = 32
#: In audited cycles checksums take memory, in pieces of 2**15 elements.
_AUDIT_BYTES = 16 * 2**15


class _Dropped(Configured):
    """Returns its input early at random, and where it is told to."""

    is_skipped, drop = False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        is_left_out = self.is_skipped or (self.drop and torch.rand(()) < self.drop)
        return x if is_left_out else super().forward(x)


class _Convolved(nn.Module):
    """Convolutions, whose weights autocast casts once: blocks of all sizes begin with the same operators."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.relu(self.norm(self.first(x))))


class _Counted(Scores):
    """Counts forwards."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        _Counted.num_forwards += 1
        return super().forward(x)


def _model(block: Callable[[int], nn.Module] = Configured, width: int = _WIDTH) -> nn.Module:
    return Net(chain, [block(width) for _ in range(6)])


def _forwards(*shapes: tuple[int, ...], summed: bool = False, num_backwards: int = 1, autocast: str = "") -> Step:
    """All forwards, then their backwards or one of their sum; autocast ends after each forward or after all of them."""
    inputs = [torch.randn(*shape) for shape in shapes]

    def cast(where: str) -> Any:
        return torch.autocast(on_device.device_type, torch.bfloat16) if autocast == where else contextlib.nullcontext()

    def step(model: nn.Module) -> None:
        losses = []
        with cast("step"):
            for x in inputs:
                with cast("forward"):
                    losses.append(model(x).float().square().mean())
                if autocast == "step":
                    losses.pop().backward()
        for loss in [torch.stack(losses).sum()] if summed else losses:
            for number in range(num_backwards):
                loss.backward(retain_graph=number + 1 < num_backwards)

    return step


def _peaks(
    make: Callable[[], nn.Module], steps: Iterable[Step], budget: float | str, **options: Any
) -> tuple[list[int], nn.Module]:
    """Return the peaks of steps under a budget, whose gradients are plain ones, and the model."""
    twins = Twins(make, budget, **{"blocks": "blocks.*", "on_infeasible": "warn", **options})
    return [twins.step(step) for step in steps], twins.model


_MakeStep = Callable[[], Step]
_LONG, _SHORT = (partial(_forwards, (4, length, _WIDTH)) for length in (128, 48))
_ONE, _TWO = partial(_forwards, (256, _WIDTH)), partial(_forwards, (256, _WIDTH), (256, _WIDTH))
_AGAIN = partial(_ONE, num_backwards=2)
_CHANGES: dict[str, tuple[Callable[[int], nn.Module], list[_MakeStep]]] = {
    "longer inputs": (Scores, [_SHORT, _LONG, _SHORT]),
    "shorter inputs": (Scores, [_LONG, _SHORT, _LONG]),
    "two forwards": (Configured, [_ONE, _TWO, _ONE]),
    "sums": (Configured, [_TWO, partial(_TWO, summed=True), _TWO]),
    "retained graphs": (Configured, [_ONE, _AGAIN, _ONE]),
    "autocast": (Configured, [_ONE, partial(_ONE, autocast="forward"), _ONE]),
    "casts of another size": (
        Configured,
        [partial(_forwards, (16, _WIDTH), *others, autocast="step") for others in ([], [(128, _WIDTH)])],
    ),
    "sizes of convolutions": (
        lambda _: _Convolved(8),
        [partial(_forwards, (2, 8, size, size), autocast="forward") for size in (16, 24)],
    ),
}


@pytest.mark.usefixtures("no_audit")  # corrected plans are audited in later cycles, and the count has their checksums
@pytest.mark.parametrize("name", _CHANGES)
@pytest.mark.parametrize("share", [0.65, 0.8])
def test_each_kind_of_cycle_is_within_the_budget_from_its_second_one_on(name: str, share: float) -> None:
    block, kinds = _CHANGES[name]
    make, steps, num = partial(_model, block), [made() for made in kinds], 5
    budget = share * max(measured(model, partial(step, model))[1] for model in [seeded(make)] for step in steps)
    peaks, model = _peaks(make, (step for step in steps for _ in range(num)), int(budget))
    for number, peak in enumerate(peaks):
        if number % num:
            assert peak <= (budget if number % num > 2 else 1.02 * budget)
    assert max(peaks[num - 1 :: num]) >= 0.8 * budget or on_device.device_type != "cpu"
    assert plan_of(model).peak_bytes <= budget


@pytest.mark.filterwarnings("ignore:apply. No plan fits")
def test_a_plan_for_a_further_size_needs_no_more_than_one_for_it_alone() -> None:
    block, kinds = _CHANGES["sizes of convolutions"]
    small, large = (made() for made in kinds)
    alone, later = (
        _peaks(partial(_model, block), steps, "40%")[0] for steps in ([large] * 4, [small] * 4 + [large] * 4)
    )
    assert later[-1] <= 1.02 * alone[-1] < alone[0]


def test_a_further_length_runs_no_block_more_than_training_does_and_a_much_longer_one_is_profiled() -> None:
    model = _model(_Counted)
    actckpt.apply(model, blocks="blocks.*", activation_budget="60%", race=False)

    def num_forwards(length: int) -> int:
        before = _Counted.num_forwards
        model.zero_grad()
        _forwards((4, length, _WIDTH))(model)
        return _Counted.num_forwards - before

    assert num_forwards(16) > 6, "the first length is profiled"
    assert num_forwards(128) > 6
    for length in (96, 160, 80):
        assert num_forwards(length) == 6


def test_blocks_that_return_early_at_random_stay_within_the_budget() -> None:
    def drawn(number: int, one: Step) -> Step:
        def step(model: nn.Module) -> None:
            torch.manual_seed(number)
            for block in model.blocks:
                block.drop = 0.4
            one(model)

        return step

    make, one = partial(_model, _Dropped), _ONE()
    checkpointed, plain = bounds(make, one)
    budget = checkpointed + 0.4 * (plain - checkpointed)
    peaks, _ = _peaks(make, [drawn(number, one) for number in range(30)], budget)
    assert max(peaks[2:]) <= 1.02 * budget + _AUDIT_BYTES
    assert sum(peak > budget for peak in peaks[2:]) <= 2


def test_sizes_that_are_new_in_most_steps_stay_within_the_budget() -> None:
    rows = [64 * (1 + (7 * number) % 13) for number in range(26)]
    checkpointed, plain = bounds(_model, _forwards((max(rows), _WIDTH)))
    budget = int(checkpointed + 0.3 * (plain - checkpointed))
    peaks, _ = _peaks(_model, [_forwards((num, _WIDTH)) for num in rows], budget)
    assert max(peaks) <= 1.02 * budget + _AUDIT_BYTES


def test_threads_that_train_a_model_each_have_meters_of_their_own() -> None:
    one = _ONE()
    checkpointed, plain = bounds(_model, one)
    budget = int(checkpointed + 0.3 * (plain - checkpointed))
    models = [seeded(_model) for _ in range(8)]

    def step(model: nn.Module) -> list[Tensor | None]:
        model.zero_grad()
        one(model)
        return gradients(model)

    expected = step(seeded(_model))
    for model in models:
        apply_budget(model, budget, blocks="blocks.*", race=True)

    def train(number: int) -> None:
        for _ in range(6):
            assert_equal(step(models[number]), expected)

    in_threads(train, len(models))
    assert max(plan_of(model).peak_bytes for model in models) <= budget


def test_the_state_of_an_optimizer_counts_from_its_first_update_on() -> None:
    model = _model(Mlp, 64)
    optimizer = torch.optim.Adam(model.parameters())
    actckpt.apply(model, blocks="blocks.*", race=False, budget=10**8, optimizer=optimizer, on_infeasible="raise")
    predicted = []
    for number in range(8):
        _forwards((64, 64), (256, 64))(model)
        plan = actckpt.report(model).plan
        predicted.append(0.0 if plan is None else plan.peak_bytes)
        if number == 3:
            optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert predicted[3] > 0.0
    assert predicted[-1] - predicted[3] == pytest.approx(2 * weights, rel=0.05)


def test_forwards_of_nothing_have_a_share() -> None:
    model = _model().requires_grad_(requires_grad=False)
    apply_budget(model, 2_000_000, blocks="blocks.*")
    for _ in range(3):
        inputs = [torch.randn(rows, _WIDTH, requires_grad=True) for rows in (0, 256)]
        for loss in [model(x).square().sum() for x in inputs]:
            loss.backward()
        assert all(x.grad is not None for x in inputs)


def test_an_error_counts_the_forwards_that_are_alive() -> None:
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match="2 forwards of the model"):
        _peaks(_model, [_TWO()] * 3, 2**12, on_infeasible="raise")


def test_a_graph_that_a_last_backward_released_counts_no_more() -> None:
    plain_bytes = bounds(_model, _AGAIN())[1]
    model, x = _model(), torch.randn(256, _WIDTH)
    apply_budget(model, 1.25 * plain_bytes, blocks="blocks.*")
    for _ in range(4):
        loss = model(x).square().mean()  # that of the step before lives until now
        loss.backward(retain_graph=True)
        loss.backward()
    assert plan_of(model).overhead_seconds == 0.0


def test_a_budget_that_is_too_small_for_a_retained_graph_is_told_in_training() -> None:
    one, again = _ONE(), _AGAIN()
    smallest = smallest_budget(lambda: _peaks(_model, [one] * 2, 2**12, on_infeasible="raise"))
    with pytest.warns(UserWarning, match="From now on the plan with the smallest peak runs"):
        _peaks(_model, [one, one, *[again] * 4], smallest, on_infeasible="raise")


def test_blocks_that_are_skipped_in_one_autocast_with_several_forwards_have_plain_gradients() -> None:
    def skipping(*skipped: int) -> Step:
        def step(model: nn.Module) -> None:
            with torch.autocast(on_device.device_type, torch.bfloat16):
                for skips in skipped:
                    for number, block in enumerate(model.blocks):
                        block.is_skipped = number == skips
                    model(torch.randn(32, _WIDTH)).square().mean().backward()

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = [skipping(*each) for each in [(2, -1), (-1, -1), (-1, 1), (-1, -1)]]
        _peaks(partial(_model, _Dropped), steps, "100%")


def _plan(training: Training, *, autocast: bool = False) -> actckpt.Plan:
    """Return the plan after some steps."""
    for _ in range(6):
        training.model.zero_grad()
        with torch.autocast(on_device.device_type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = training.model(training.tokens).flatten(0, 1)
        functional.cross_entropy(logits.float(), training.tokens.flatten()).backward()
    return plan_of(training.model)


def test_autocast_has_plans_of_its_own() -> None:
    training = Training()
    apply_budget(training.model, "60%", on_infeasible="warn")
    plain, cast = _plan(training), _plan(training, autocast=True)
    assert cast.costs != plain.costs
    assert "aten._to_copy" in str(cast.places) and "aten._to_copy" not in str(plain.places)
    assert _plan(training).actions == plain.actions
    assert _plan(training, autocast=True).actions == cast.actions


def test_parameters_that_are_trained_from_some_step_on_have_plans_of_their_own_and_may_be_replaced() -> None:
    training = Training()
    model = training.model
    frozen = nn.ModuleList([model.embedding, *model.blocks[:4]]).requires_grad_(False)
    actckpt.apply(model, activation_budget="95%", race=False)
    few = _plan(training)
    frozen.requires_grad_(True)
    everything = _plan(training)
    assert everything.budget_bytes > 1.5 * few.budget_bytes  # a share of what plain training needs
    frozen.requires_grad_(False)
    assert _plan(training).actions == few.actions
    old = weakref.ref(model.head.bias)
    model.head.bias = nn.Parameter(model.head.bias.detach().clone())
    assert old() is None, "a budget keeps a parameter alive"
    _plan(training)
