"""`apply(budget=...)` makes a plan of its own where a step is of another kind: what it holds differs."""

from __future__ import annotations

import contextlib
import weakref

import on_device
import torch
from test_budgets import Training
from torch.nn import functional

import actckpt
from actckpt.planner.plans import Plan


def _plan(training: Training, *, autocast: bool = False) -> Plan:
    """Return the plan after some steps."""
    for _ in range(6):
        training.model.zero_grad()
        with torch.autocast(on_device.device_type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = training.model(training.tokens).flatten(0, 1)
        functional.cross_entropy(logits.float(), training.tokens.flatten()).backward()
    plan = actckpt.report(training.model).plan
    assert plan is not None
    return plan


def test_autocast() -> None:
    training = Training()
    actckpt.apply(training.model, activation_budget="60%", race=False)
    plain = _plan(training)
    cast = _plan(training, autocast=True)
    assert cast.costs != plain.costs
    assert "aten._to_copy" in str(cast.places) and "aten._to_copy" not in str(plain.places)
    assert _plan(training).actions == plain.actions
    assert _plan(training, autocast=True).actions == cast.actions


def test_parameters_that_are_trained_from_some_step_on() -> None:
    training = Training()
    frozen = [*training.model.embedding.parameters(), *training.model.blocks[:4].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    actckpt.apply(training.model, activation_budget="95%", race=False)
    few = _plan(training)
    for parameter in frozen:
        parameter.requires_grad_(True)
    everything = _plan(training)
    assert everything.budget_bytes > 1.5 * few.budget_bytes  # a share of what plain training needs
    for parameter in frozen:
        parameter.requires_grad_(False)
    assert _plan(training).actions == few.actions


def test_a_budget_keeps_no_parameter_alive() -> None:
    training = Training()
    actckpt.apply(training.model, activation_budget="60%", race=False)
    _plan(training)
    old = weakref.ref(training.model.head.bias)
    training.model.head.bias = torch.nn.Parameter(training.model.head.bias.detach().clone())
    assert old() is None
    _plan(training)
