"""Budgets of steps in which several forwards are alive at once, of the same size or of others."""

from __future__ import annotations

import gc
from collections.abc import Sequence

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
    """Return the plan, and the peaks of all steps but the first, in which everything is checkpointed."""
    gc.collect()  # of the model before, whose bytes count on a device
    model, peaks = _model(), []
    actckpt.apply(model, blocks=Mlp, race=False, **{"budget" if total else "activation_budget": budget})
    for _ in range(4):
        gradients, peak_bytes = _step(model, rows, total=total, is_summed=is_summed)
        assert_equal(gradients, expected)
        peaks.append(peak_bytes)
    plan = actckpt.report(model).plan
    assert plan is not None
    return plan, peaks[1:]


def _smallest(rows: Sequence[int], *, total: bool, is_summed: bool, expected: list[Tensor]) -> tuple[int, str]:
    """Return the smallest budget that an error names, and its text."""
    with pytest.raises(actckpt.PlanInfeasibleError) as raised:
        _trained(2**20 if total else 2**12, rows, total=total, is_summed=is_summed, expected=expected)
    found, text = raised.value.smallest_bytes, str(raised.value)
    del raised  # and the model with it
    assert found is not None
    return found, text


@pytest.mark.parametrize("is_summed", [False, True], ids=["apart", "summed"])
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("rows", [(256, 256), (256, 1024), (1024, 256), (256, 1024, 512)], ids=str)
def test_forwards_of_other_sizes_share_a_budget(rows: tuple[int, ...], total: bool, is_summed: bool) -> None:
    expected, plain_bytes = _step(_model(), rows, total=total, is_summed=is_summed)
    least_bytes, text = _smallest(rows, total=total, is_summed=is_summed, expected=expected)
    assert least_bytes < 0.6 * plain_bytes
    assert (f"{len(rows)} were alive at once" if len(set(rows)) == 1 else f"other sizes, {len(rows)} in all") in text
    for share in (0.0, 0.3, 0.6, 0.9):
        budget = int(1.01 * least_bytes + share * (plain_bytes - least_bytes))
        plan, peaks = _trained(budget, rows, total=total, is_summed=is_summed, expected=expected)
        assert max(peaks) <= budget
        assert any(plan.rerun) or plan.overhead_seconds > 0.0


@pytest.mark.parametrize("rows", [(256, 256), (256, 1024), (256, 1024, 512)], ids=str)
def test_percentages_are_of_what_all_of_them_make(rows: tuple[int, ...]) -> None:
    expected, plain_bytes = _step(_model(), rows, total=False, is_summed=False)
    for percent in (50, 80, 100):
        plan, peaks = _trained(f"{percent}%", rows, total=False, is_summed=False, expected=expected)
        assert 0.7 * percent * plain_bytes / 100 <= max(peaks) <= percent * plain_bytes / 100
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
    for share in (0.0, 0.5, 0.9):
        budget = int(1.01 * least_bytes + share * (plain_bytes - least_bytes))
        _, peaks = _trained(budget, rows, total=total, is_summed=True, expected=expected)
        assert max(peaks) <= budget
    if not total:
        plan, peaks = _trained("100%", rows, total=False, is_summed=True, expected=expected)
        assert plan.overhead_seconds == 0.0 and max(peaks) <= plain_bytes


def test_a_backward_that_reads_several_forwards_only_later_is_planned_from_then_on() -> None:
    rows, model = (64, 64), _model()
    apart, summed = (_step(_model(), rows, total=False, is_summed=kind) for kind in (False, True))
    actckpt.apply(model, blocks=Mlp, activation_budget=int(1.6 * summed[1]), race=False)
    plans = []
    for is_summed, (expected, _) in [(False, apart)] * 3 + [(True, summed)] * 3:
        gradients, _ = _step(model, rows, total=False, is_summed=is_summed)
        assert_equal(gradients, expected)
        plan = actckpt.report(model).plan
        plans.append(None if plan is None else plan.costs.fixed_bytes)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert plans == [None, 0.0, 0.0, 0.0, weights, weights]
