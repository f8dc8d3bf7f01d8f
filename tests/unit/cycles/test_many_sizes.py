"""Budgets of programs that call a model with more sizes than have plans of their own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Net
from oracle import assert_equal
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt
from actckpt._cycles import known_kinds
from actckpt.memory import LiveStorages

DIM = 32


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_kinds, "_OWN_PLANS", 3)
    monkeypatch.setattr(known_kinds, "_MOST_PLANS", 5)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(DIM) for _ in range(4)))


def _step(model: nn.Module, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], int, int]:
    """Run all forwards, then their backwards; return gradients, the peak, and what was held in between."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, DIM, generator=generator) for shape in shapes]
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        losses = [model(x).square().mean() for x in inputs]
        held_bytes = live.live_bytes
        for loss in losses:
            loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], live.peak_bytes, held_bytes


def _applied(budget: Any, shapes: Sequence[tuple[int, ...]] = ()) -> nn.Module:
    """Return a model with a budget that ran two steps of each shape."""
    model = _model()
    actckpt.apply(model, blocks=Mlp, activation_budget=budget, race=False, on_infeasible="raise")
    for shape in [*shapes, *shapes]:
        _step(model, [shape])
    return model


def _held_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    return _step(model, [shape])[2]


def _plan(model: nn.Module) -> actckpt.Plan | None:
    return actckpt.report(model).plan


def test_smaller_sizes_run_the_plan_of_a_larger_one_within_the_budget() -> None:
    draw = random.Random(0)
    _, plain_bytes, _ = _step(_model(), [(8, 64)])
    model = _applied(int(0.6 * plain_bytes))
    lengths = [(8, 64), (8, 16), (8, 32)] * 2 + [(8, draw.randint(1, 64)) for _ in range(20)]
    for number, shape in enumerate(lengths):
        expected, _, _ = _step(_model(), [shape])
        gradients, peak_bytes, _ = _step(model, [shape])
        assert_equal(gradients, expected)
        assert number < 6 or (peak_bytes <= 0.6 * plain_bytes and _plan(model) is not None)
    model = _applied("100%", [(8, 64), (8, 16), (8, 32)])
    for length in range(1, 64, 7):  # and recompute no more than it does
        assert _held_bytes(model, (8, length)) == _held_bytes(_model(), (8, length))


def test_the_plan_of_the_smallest_size_that_is_larger_runs() -> None:
    model, found = _model(), {}
    actckpt.apply(model, blocks=Mlp, activation_budget="70%", race=False, on_infeasible="raise")
    for shape in [(8, 64), (8, 16), (4, 128)] * 2:
        _step(model, [shape])
        found[shape] = _plan(model)
    for shape, larger in {(8, 12): (8, 16), (8, 17): (8, 64), (4, 65): (4, 128), (1, 1): (8, 16)}.items():
        _step(model, [shape])
        assert _plan(model) == found[larger]


def test_larger_sizes_have_plans_of_their_own_and_too_many_are_told() -> None:
    model = _applied("100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in [(8, length) for length in (8, 16, 24, 32, 40)] * 2:
            _step(model, [shape])
        assert _held_bytes(model, (8, 39)) == _held_bytes(_model(), (8, 39))
    with pytest.warns(UserWarning, match=r"a Sequential with a budget was called with too many sizes"):
        assert _held_bytes(model, (8, 41)) < 0.5 * _held_bytes(_model(), (8, 41))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _held_bytes(model, (8, 41)) < 0.5 * _held_bytes(_model(), (8, 41))
        assert _held_bytes(model, (7, 40)) == _held_bytes(_model(), (7, 40))


def test_forwards_that_are_alive_with_one_of_a_larger_size_share_the_budget() -> None:
    """Once one was measured with the larger size, smaller ones run its plan."""
    _, plain_bytes, _ = _step(_model(), [(8, 64), (8, 60)])
    model = _applied(int(0.7 * plain_bytes), [(8, 64), (8, 16), (8, 32)])
    peaks = []
    for length in (60, 61, 55, 50, 58):
        shapes = [(8, 64), (8, length)]
        gradients, peak_bytes, _ = _step(model, shapes)
        assert_equal(gradients, _step(_model(), shapes)[0])
        peaks.append(peak_bytes)
    assert max(peaks[2:]) <= 0.7 * plain_bytes


def test_steps_of_smaller_sizes_take_no_turn_in_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    actckpt.apply(model, blocks=Mlp, activation_budget="60%", on_infeasible="raise")
    for shape in [(8, 64), (8, 16), (8, 32)] * 2:
        _step(model, [shape])
    _step(model, [(8, 64)])
    left, held = actckpt.report(model).race_steps_left, set()
    for _ in range(5):
        held.add(_held_bytes(model, (8, 50)))
        assert actckpt.report(model).race_steps_left == left > 0
    for _ in range(3):  # other plans have their turns
        _step(model, [(8, 64)])
        held.add(_held_bytes(model, (8, 50)))
    assert len(held) == 1


@pytest.mark.parametrize("small", [[(8, 3)] * 6, [(8, 16), (8, 3), (8, 3)], [(8, 40), (8, 30)]])
@pytest.mark.parametrize("autocast", [False, True])
def test_smaller_forwards_that_are_alive_together_have_plans_of_their_own(small: Any, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, plain_bytes, _ = _step(_model(), [(8, 64)])
        model = _applied(int(0.8 * plain_bytes), [(8, 64), (64, 4), (4, 2)])
        _step(model, [(8, 64)])
        before = _plan(model)
        expected = _step(_model(), small)[0]
        for _ in range(4):
            gradients, peak_bytes, _ = _step(model, small)
            assert_equal(gradients, expected)
        assert peak_bytes <= 0.8 * plain_bytes
        _, peak_bytes, _ = _step(model, [(8, 64)])
        assert peak_bytes <= 0.8 * plain_bytes and _plan(model).budget_bytes == before.budget_bytes


def test_gradients_count_once_where_smaller_forwards_are_alive_together() -> None:
    def step(model: nn.Module, shapes: Sequence[tuple[int, ...]]) -> int:
        model.zero_grad()
        with LiveStorages() as live:
            losses = [model(torch.randn(*shape, DIM)).square().mean() for shape in shapes]
            for loss in losses:
                loss.backward()
        return live.peak_bytes

    weights_bytes = sum(parameter.nbytes for parameter in _model().parameters())
    plain_bytes = weights_bytes + step(_model(), [(16, 64), (16, 64)])
    model = _model()
    actckpt.apply(model, blocks=Mlp, budget=plain_bytes, race=False, on_infeasible="raise")
    for shape in [(16, 128), (16, 32), (16, 16)] * 2:
        step(model, [shape])
    peaks = [step(model, [(16, 64), (16, 64)]) for _ in range(4)]
    assert weights_bytes + peaks[-1] <= plain_bytes


def _of_rows_without_padding() -> nn.Module:
    return Net(lambda net, x, mask: net.inner(x[mask]), [], inner=_model())


def _cut(model: nn.Module, padded: int, rows: int) -> int:
    """Return the peak."""
    x, mask = torch.randn(padded, DIM), torch.arange(padded) < rows
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(x, mask).square().mean().backward()
    return live.peak_bytes


def test_a_smaller_size_that_has_more_inside_gets_a_plan_of_its_own() -> None:
    model = _of_rows_without_padding()
    actckpt.apply(model, blocks=Mlp, activation_budget="100%", race=False, on_infeasible="raise")
    for size in [(512, 200), (16, 16), (8, 8)] * 2:
        _cut(model, *size)
    _cut(model, 512, 200)
    larger = _plan(model)
    for _ in range(3):
        peak_bytes = _cut(model, 500, 400)
    own = _plan(model)
    assert own is not None and larger is not None and own.peak_bytes > 1.5 * larger.peak_bytes
    assert peak_bytes <= own.peak_bytes + 8, "the loss, outside of the model, and its gradient"
    _cut(model, 512, 200)
    assert _plan(model) is larger


def test_a_size_that_is_measured_again_has_a_plan_for_smaller_ones() -> None:
    model = _of_rows_without_padding()
    actckpt.apply(model, blocks=Mlp, activation_budget="100%", race=False, on_infeasible="raise")
    for size in [(512, 200), (16, 16), (8, 8), (9, 9), (10, 10)] * 2:
        _cut(model, *size)
    _cut(model, 512, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        losses = [
            model(torch.randn(size, DIM), torch.arange(size) < rows).square().mean()
            for size, rows in [(512, 500), (500, 200)]
        ]
        for loss in losses:
            loss.backward()
        _cut(model, 500, 200)
    assert _plan(model) is not None


def test_jagged_tensors_are_of_one_size_and_growing_ones_are_measured_again() -> None:
    model = Net(lambda net, x: net.inner(x.values()), [], inner=_model())
    actckpt.apply(model, blocks=Mlp, activation_budget="100%", race=False, on_infeasible="raise")
    plans = []
    for rows in (90, 80, 70, 60, 50, 300, 300, 300, 40):
        parts = [torch.randn(rows, DIM), torch.randn(9, DIM)]
        model.zero_grad()
        model(torch.nested.nested_tensor(parts, layout=torch.jagged)).square().mean().backward()
        plans.append(_plan(model))
    assert plans[2] is not None and plans[4] is plans[2]
    assert plans[-1] is not None and plans[-1].peak_bytes > 2 * plans[2].peak_bytes


def test_a_forward_that_was_refused_beside_another_one_is_not_planned_for() -> None:
    expected, plain_bytes, _ = _step(_model(), [(8, 64)])
    model = _applied(int(0.45 * plain_bytes))
    for _ in range(2):
        _step(model, [(8, 64)])
    if on_device.device_type == "cpu":  # a plan ran already: later ones exceed the budget with a warning
        with pytest.warns(UserWarning, match="2 forwards of the model"):
            for _ in range(3):
                _step(model, [(8, 64)] * 2)
    else:
        with pytest.raises(actckpt.errors.PlanInfeasibleError, match="of which 2 were alive at once"):
            _step(model, [(8, 64)] * 2)
    for _ in range(2):  # so the program divides its batch
        gradients, peak_bytes, _ = _step(model, [(8, 64)])
        assert_equal(gradients, expected)
        assert peak_bytes <= 0.45 * plain_bytes


def test_a_smaller_size_that_fits_is_not_refused_with_the_larger_one() -> None:
    model = _applied(_step(_model(), [(8, 16)])[1], [(8, 4), (8, 5), (8, 6)])
    _step(model, [(8, 256)])
    for _ in range(3):
        gradients, peak_bytes, _ = _step(model, [(8, 8)])
        assert_equal(gradients, _step(_model(), [(8, 8)])[0])
    assert peak_bytes <= _step(_model(), [(8, 16)])[1]
    for _ in range(5):
        with pytest.raises(actckpt.errors.PlanInfeasibleError):
            _step(model, [(8, 256)])
