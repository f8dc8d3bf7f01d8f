"""Budgets of steps in which several forwards are alive at once, of the same size or of others."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import on_device
import pytest
import torch
from oracle import assert_equal
from peaks import counted
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt

DIM = 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(DIM) for _ in range(6)))


def _step(model: nn.Module, rows: Sequence[int], *, total: bool, is_summed: bool) -> tuple[list[Tensor], int]:
    """Run one forward per number of rows, then backward of them all; return gradients, and the peak."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(num, DIM, generator=generator) for num in rows]
    model.zero_grad()
    with counted(model, total=total, held=list(model.parameters())) as count:
        losses = [model(x).square().mean() for x in inputs]
        for loss in [torch.stack(losses).sum()] if is_summed else losses:
            loss.backward()
    return [p.grad.cpu() for p in model.parameters()], count.peak_bytes


def _trained(
    budget: int | str, rows: Sequence[int], *, total: bool, is_summed: bool, expected: list[Tensor]
) -> tuple[actckpt.Plan, list[int]]:
    """Return the plan, and the peaks of the steps that run it."""
    gc.collect()  # of the model before, whose bytes count on a device
    model, peaks = _model(), []
    actckpt.apply(
        model, blocks=Mlp, race=False, **{"budget" if total else "activation_budget": budget}, on_infeasible="raise"
    )
    num_first = 1 if on_device.device_type == "cpu" else 5  # there, links are measured, and audits take memory
    for _ in range(num_first + 3):
        gradients, peak_bytes = _step(model, rows, total=total, is_summed=is_summed)
        assert_equal(gradients, expected)
        peaks.append(peak_bytes)
    plan = actckpt.report(model).plan
    assert plan is not None
    return plan, peaks[num_first:]


def _smallest(rows: Sequence[int], *, total: bool, is_summed: bool, expected: list[Tensor]) -> tuple[int, str]:
    """Return the smallest budget that an error names, and its text."""
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        _trained(2**20 if total else 2**12, rows, total=total, is_summed=is_summed, expected=expected)
    found, text = raised.value.smallest_bytes, str(raised.value)
    del raised  # and the model with it
    assert found is not None
    return int(found), text


@pytest.mark.parametrize("is_summed", [False, True], ids=["apart", "summed"])
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("rows", [(256, 256), (256, 1024), (1024, 256), (256, 1024, 512)], ids=str)
def test_forwards_of_other_sizes_share_a_budget(rows: tuple[int, ...], total: bool, is_summed: bool) -> None:
    expected, plain_bytes = _step(_model(), rows, total=total, is_summed=is_summed)
    least_bytes, text = _smallest(rows, total=total, is_summed=is_summed, expected=expected)
    counts_others = total and on_device.device_type != "cpu"  # all that other tests left on the device
    assert least_bytes < (0.8 if counts_others else 0.6) * plain_bytes
    assert f"{len(rows)} forwards of the model" in text
    for share in (0.0, 0.6):
        budget = int(1.01 * least_bytes + share * (plain_bytes - least_bytes))
        plan, peaks = _trained(budget, rows, total=total, is_summed=is_summed, expected=expected)
        assert max(peaks) <= budget
        assert any(plan.rerun) or plan.overhead_seconds > 0.0


@pytest.mark.parametrize("rows", [(256, 256), (256, 1024), (256, 1024, 512)], ids=str)
def test_percentages_are_of_what_all_of_them_make(rows: tuple[int, ...]) -> None:
    expected, plain_bytes = _step(_model(), rows, total=False, is_summed=False)
    for percent in (50, 80, 100):
        plan, peaks = _trained(f"{percent}%", rows, total=False, is_summed=False, expected=expected)
        assert 0.7 * percent * plain_bytes / 100 <= max(peaks) <= plan.budget_bytes
        of_allocator = 1.0 if on_device.device_type == "cpu" else 1.02  # which gives out more than storages have
        assert plan.budget_bytes <= of_allocator * percent * plain_bytes / 100 + 1024
        assert (plan.overhead_seconds > 0.0 or any(plan.rerun)) == (percent < 100)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("rows", [(64, 64), (32, 128)], ids=str)
def test_gradients_of_weights_wait_where_one_backward_reads_several_forwards(
    rows: tuple[int, ...], total: bool
) -> None:
    """Weights are most of what a step holds: their sums wait until the gradients of the other forward have come."""
    expected, plain_bytes = _step(_model(), rows, total=total, is_summed=True)
    least_bytes, _ = _smallest(rows, total=total, is_summed=True, expected=expected)
    assert least_bytes < plain_bytes
    for share in (0.0, 0.7):
        budget = int(1.01 * least_bytes + share * (plain_bytes - least_bytes))
        _, peaks = _trained(budget, rows, total=total, is_summed=True, expected=expected)
        assert max(peaks) <= budget
    if not total:
        plan, peaks = _trained("100%", rows, total=False, is_summed=True, expected=expected)
        assert plan.overhead_seconds == 0.0 and max(peaks) <= plain_bytes


def test_a_backward_that_reads_several_forwards_only_later_is_planned_from_then_on() -> None:
    rows, model = (64, 64), _model()
    apart, summed = (_step(_model(), rows, total=False, is_summed=kind) for kind in (False, True))
    least_bytes, _ = _smallest(rows, total=False, is_summed=True, expected=summed[0])
    budget = int(1.05 * least_bytes)
    actckpt.apply(model, blocks=Mlp, activation_budget=budget, race=False, on_infeasible="raise")
    peaks = []
    for is_summed, (expected, _) in [(False, apart)] * 3 + [(True, summed)] * 4 + [(False, apart), (True, summed)] * 2:
        gradients, peak_bytes = _step(model, rows, total=False, is_summed=is_summed)
        assert_equal(gradients, expected)
        peaks.append(peak_bytes)
    assert max(peaks[5:]) <= budget
    plan = actckpt.report(model).plan
    assert plan is not None and plan.peak_bytes >= 0.9 * max(peaks[5:])


def test_the_state_of_an_optimizer_counts_from_its_first_update_on() -> None:
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    actckpt.apply(model, blocks=Mlp, race=False, budget=10**8, optimizer=optimizer, on_infeasible="raise")
    predicted = []
    for number in range(8):
        for loss in [model(torch.randn(rows, DIM)).square().mean() for rows in (64, 256)]:
            loss.backward()
        plan = actckpt.report(model).plan
        predicted.append(0.0 if plan is None else plan.peak_bytes)
        if number == 3:
            optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert predicted[3] > 0.0
    assert predicted[-1] - predicted[3] == pytest.approx(2 * weights, rel=0.05)


class _Cut(nn.Module):
    """Blocks that get the rows that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _model()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(x[: int((x[:, 0] < 90).sum())])
        return found


def test_a_size_that_never_begins_alone_is_measured_again_when_it_grows_inside() -> None:
    model, sizes = _Cut(), []
    actckpt.apply(model, blocks=Mlp, race=False, activation_budget=10**9, on_infeasible="raise")
    for number in range(10):
        padded = torch.randn(600, DIM)
        padded[64 if number < 4 else 512 :, 0] = 100
        for loss in [model(x).square().mean() for x in (torch.randn(32, DIM), padded)]:
            loss.backward()
        plan = actckpt.report(model).plan
        sizes.append(0.0 if plan is None else plan.peak_bytes)
    assert sizes[-1] > 5 * sizes[3] > 0.0


def test_forwards_of_nothing_have_a_share() -> None:
    model = _model().requires_grad_(requires_grad=False)
    actckpt.apply(model, blocks=Mlp, race=False, activation_budget=2_000_000, on_infeasible="raise")
    for _ in range(3):
        inputs = [torch.randn(rows, DIM, requires_grad=True) for rows in (0, 256)]
        for loss in [model(x).square().sum() for x in inputs]:
            loss.backward()
        assert all(x.grad is not None for x in inputs)
