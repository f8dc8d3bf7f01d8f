"""Real models of Transformers that find a plan while they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers_models import MODELS, batch, cached_tensors, make

import actckpt
from actckpt.memory import LiveStorages


def _step(model: Any, name: str, **options: bool) -> tuple[list[torch.Tensor | None], int]:
    torch.manual_seed(2)
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(**batch(name), **options).loss.backward()
    return [parameter.grad for parameter in model.parameters()], live.peak_bytes


@pytest.fixture(autouse=True)
def no_audit() -> None:
    """Leave no checksums: in models of 250 KiB, those of a first step are more than what a budget leaves free."""
    actckpt.configure(audit="off")


@pytest.mark.filterwarnings("ignore:apply. .* is given a key-value cache")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_budget_has_plain_gradients_and_fits(name: str) -> None:
    plain, ours = make(name).train(), make(name).train()
    expected, plain_peak = _step(plain, name, use_cache=False)  # blocks of a model with a plan have no cache
    actckpt.apply(ours, activation_budget="80%")
    peaks = []
    for _ in range(3):
        found, peak = _step(ours, name)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        peaks.append(peak)
    plan = actckpt.report(ours).plan
    assert plan is not None
    assert peaks[-1] <= plan.budget_bytes / 0.98 and peaks[-1] < plain_peak


@pytest.mark.filterwarnings("ignore:apply. .* is given a key-value cache")
def test_blocks_that_run_as_they_are_write_nothing_to_a_cache_that_others_share() -> None:
    """A cache that holds something is not taken away from blocks that run again: they would write to it twice."""
    model = make("bloom").train()
    actckpt.apply(model, activation_budget="90%", race=False)
    for _ in range(3):
        found = model(**batch("bloom"))
        found.loss.backward()
    plan = actckpt.report(model).plan
    assert plan is not None
    assert actckpt.report(model).race_steps_left == 0 and plan.overhead_seconds > 0.0
    assert not cached_tensors(found.past_key_values)
