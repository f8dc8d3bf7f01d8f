"""Budgets hold where gradients stay between forwards, and where kernels, skips and losses need what no tensor shows."""

from __future__ import annotations

import functools

import pytest
import torch
from demo_training import Training, start_peak
from oracle import assert_equal
from peaks import smallest_budget
from test_smallest_budgets import ConvBlock, UNet
from torch import Tensor, nn

import actckpt
from actckpt._budget.workspaces import WorkingStorages

_LAYERS = 4
#: docs/cycles.md: where the first step of a plan exceeds the budget, the one after it is the last under that plan.
_SETTLING = 3


def _plan(model: nn.Module) -> actckpt.Plan:
    plan = actckpt.report(model).plan
    assert plan is not None
    return plan


def _accumulated(micro_steps: int, budget: int | None, *, with_optimizer: bool) -> list[tuple[int, list[Tensor]]]:
    """Train four steps of so many micro-batches each; return peak and gradients of each micro-batch."""
    training = Training(layers=_LAYERS)
    optimizer = torch.optim.AdamW(training.model.parameters()) if with_optimizer else None
    if budget is not None:
        actckpt.apply(training.model, budget=budget, optimizer=optimizer, race=False)
    found = []
    for number in range(4 * micro_steps):
        if number % micro_steps == 0:
            training.model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        start_peak()
        training.step()
        gradients = [p.grad.cpu() for p in training.model.parameters() if p.grad is not None]
        found.append((torch.accelerator.max_memory_allocated(), gradients))
        if optimizer is not None and (number + 1) % micro_steps == 0:
            optimizer.step()
    return found


@pytest.mark.parametrize(
    ("micro_steps", "share", "with_optimizer"), [(3, 0.48, False), (2, 0.69, True), (4, 0.52, True), (4, 0.69, True)]
)
def test_gradients_that_stay_between_forwards(micro_steps: int, share: float, with_optimizer: bool) -> None:
    plainly = _accumulated(micro_steps, None, with_optimizer=with_optimizer)
    budget = int(share * max(peak for peak, _ in plainly))
    found = _accumulated(micro_steps, budget, with_optimizer=with_optimizer)
    for (_, gradients), (_, expected) in zip(found, plainly, strict=True):
        assert_equal(gradients, expected)
    peaks = [peak for peak, _ in found]
    assert max(peaks[_SETTLING:]) <= budget, f"budget {budget}, peaks {peaks}"
    assert max(peaks[_SETTLING:]) >= 0.9 * budget, f"budget {budget}, peaks {peaks}"


def _unet_peaks(budget: int | None, num_steps: int, dtype: torch.dtype) -> tuple[list[int], nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = UNet().to("sim", dtype)
    x = torch.randn(2, 3, 48, 48).to("sim", dtype)
    if budget is not None:
        actckpt.apply(model, budget=budget, blocks=ConvBlock, on_infeasible="raise")
    peaks = []
    for _ in range(num_steps):
        model.zero_grad()
        start_peak()
        model(x).square().mean().backward()
        peaks.append(torch.accelerator.max_memory_allocated())
    return peaks, model, [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [0.0, 0.3, 0.7])
def test_workspaces_of_kernels_and_skips_are_planned_for(dtype: torch.dtype, more: float) -> None:
    (plain,), model, expected = _unet_peaks(None, 1, dtype)
    del model  # which would count toward the budget
    smallest = smallest_budget(lambda: _unet_peaks(1 << 20, 2, dtype))
    budget = int(smallest + more * (plain - smallest))
    peaks, _, gradients = _unet_peaks(budget, 6, dtype)
    assert_equal(gradients, expected)
    assert max(peaks[_SETTLING:]) <= budget, f"budget {budget}, peaks {peaks}"
    assert peaks[1] <= 1.02 * budget, "but for checksums of the first run of a plan"
    assert smallest < 0.75 * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_needs_is_what_the_allocator_gives_it(dtype: torch.dtype) -> None:
    block = ConvBlock(16).to("sim", dtype)
    x = torch.randn(2, 16, 48, 48).to("sim", dtype).requires_grad_()
    gradient = torch.ones_like(x)

    def run(working: WorkingStorages | None) -> int:
        block.zero_grad()
        x.grad = None
        before = start_peak()
        y = block(x)
        y.backward(gradient)
        return torch.accelerator.max_memory_allocated() - before

    run(None)
    expected = run(None)
    for is_high in (False, True):  # with a peak from before, nothing is seen to rise
        working = WorkingStorages(torch.device("sim:0"))
        block.zero_grad()
        x.grad = None
        start_peak()
        if is_high:
            torch.empty(1 << 26, device="sim")
        with working.section():
            y = block(x)
            y.backward(gradient)
        if is_high:
            assert expected <= working.peak_bytes <= 2 * expected
        else:
            assert working.peak_bytes == pytest.approx(expected, rel=0.01)
        del y


def test_a_loss_is_planned_for_from_the_step_after_the_first_on() -> None:
    budget = 10 << 20
    training = Training(layers=_LAYERS)
    training.outputs = lambda logits: functools.reduce(lambda found, _: found.sin(), range(12), logits)
    expected = training.gradients()
    actckpt.apply(training.model, budget=budget, race=False)
    peaks = [training.peak() for _ in range(7)]
    assert max(peaks[1:]) <= budget and max(peaks[_SETTLING:]) >= 0.9 * budget, peaks
    assert_equal(training.gradients(), expected)


def test_a_head_that_was_taken_to_need_too_much_gives_room_back() -> None:
    training = Training(layers=_LAYERS)
    plain = training.peak()
    budget = int(0.7 * plain)
    actckpt.apply(training.model, budget=budget, race=False)
    peaks = [training.peak() for _ in range(7)]
    assert max(peaks) <= budget
    assert peaks[-1] >= 0.95 * budget, f"of {budget} only {peaks} are used"
