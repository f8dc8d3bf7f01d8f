"""With a budget, a copy or a file of one block has that block, and not the model that it was in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import Step, Twins, smallest_budget
from residual_mlp import mlps
from test_budgets import Training
from torch import nn

import actckpt


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_copy_of_one_block_takes_nothing_of_the_model_along(num_steps: int) -> None:
    training = Training()
    actckpt.apply(training.model, activation_budget="60%", race=False)
    for _ in range(num_steps):
        training.step()
    block = training.model.blocks[0]
    own_bytes = sum(parameter.nbytes for parameter in block.parameters())
    whole_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    assert len(pickle.dumps(block)) < 2 * own_bytes + 20_000 < whole_bytes
    x = torch.randn(32, 32, 32)  # of a larger size than the model was given
    for copied in (copy.deepcopy(block).eval(), pickle.loads(pickle.dumps(block)).eval()):
        copied.zero_grad()
        copied(x).sum().backward()
        ours = [parameter.grad for parameter in copied.parameters()]
        assert actckpt.remove(copied) == ("Block",)
        copied.zero_grad()
        copied(x).sum().backward()
        assert_equal([parameter.grad for parameter in copied.parameters()], ours)
    training.step()  # the model trains on
    assert actckpt.report(training.model).plan is not None or num_steps == 0


@pytest.mark.parametrize("has_gradients", [False, True])
def test_what_a_copied_block_did_is_told_by_its_own_first_step_with_gradients(has_gradients: bool) -> None:
    training = Training()
    actckpt.apply(training.model, activation_budget="60%", race=False)
    training.step()
    copied = copy.deepcopy(training.model.blocks[0])
    assert "policy" not in actckpt.report(copied).note
    with torch.set_grad_enabled(has_gradients):
        result = copied(torch.randn(4, 32, 32)).sum()
    if has_gradients:
        result.backward()
    found = actckpt.report(copied)
    if has_gradients:
        assert found.recomputed_bytes and found.note.startswith("Recorded: ")
    else:
        assert not found.rows and "a copy of those of a model with a budget" in found.note


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_its_budget_and_is_planned_anew_without_the_optimizer(
    num_steps: int, copied_by: Callable[[nn.Module], nn.Module]
) -> None:
    """Also of one made within a step: the first one, the one after it, and one of a race."""
    training = Training()
    plain_bytes = len(pickle.dumps(training.model))
    expected = training.gradients()
    training.model.zero_grad()
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.0)
    actckpt.apply(training.model, activation_budget="60%", optimizer=optimizer)
    for _ in range(num_steps):
        training.step()
        optimizer.step()
    optimizer.zero_grad()
    assert len(pickle.dumps(training.model)) < plain_bytes + 20_000

    output = training.model(training.tokens)
    copied = copied_by(training.model)
    del output
    found = actckpt.report(copied)
    assert found.policy == "activation_budget='60%'" and found.policy in str(found)
    assert found.plan is None and not found.blocks_ran and "policy 'keep'" not in str(found)
    other = Training()
    other.model = copied
    for _ in range(3):
        assert_equal(other.gradients(), expected)
    assert actckpt.report(copied).plan is not None
    assert_equal(training.gradients(), expected)  # the model trains on
    assert actckpt.report(training.model).plan is not None or num_steps == 0
    actckpt.remove(training.model)
    assert not training.model._forward_hooks and not training.model._forward_pre_hooks
    assert not any("forward" in vars(module) for module in training.model.modules())
    assert_equal(training.gradients(), expected)


@pytest.mark.parametrize("policy", ["recompute", "matmuls", "keep", ["aten.addmm"]])
def test_a_loaded_model_reports_the_policy_that_it_was_given(policy: Any) -> None:
    training = Training()
    actckpt.apply(training.model, policy=policy)
    training.step()
    found = actckpt.report(pickle.loads(pickle.dumps(training.model)))
    assert found.policy == f"policy={policy!r}" and f"(policy={policy!r})" in str(found)
    assert not found.blocks_ran and "no block has run yet" in found.note


def _micro_batches() -> Step:
    """Two micro-batches in one autocast, in which gradients of cast weights wait."""
    inputs = [torch.randn(64, 64) for _ in range(2)]

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for x in inputs:
                model(x).float().square().mean().backward()

    return step


def test_a_copy_of_a_model_meets_the_smallest_budget_of_the_model() -> None:
    make, step = partial(mlps, 6, 64), _micro_batches()
    twins = Twins(make, 1000)
    smallest = smallest_budget(lambda: twins.step(step, 2))
    assert smallest < 1.05 * twins.plain_peak
    twins = Twins(make, smallest)
    twins.step(step)
    twins.model = copy.deepcopy(twins.model)
    assert twins.step(step, 3) <= smallest
