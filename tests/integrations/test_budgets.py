"""Real models of Transformers that find a plan while they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers_models import MODELS, batch, make

import actckpt
from actckpt.memory import LiveStorages


def _step(model: Any, name: str) -> tuple[list[torch.Tensor | None], int]:
    torch.manual_seed(2)
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(**batch(name)).loss.backward()
    return [parameter.grad for parameter in model.parameters()], live.peak_bytes


@pytest.fixture(autouse=True)
def no_audit() -> Iterator[None]:
    """Leave no checksums: in models of 250 KiB, those of a first step are more than what a budget leaves free."""
    before = actckpt.configure().audit
    actckpt.configure(audit="off")
    yield
    actckpt.configure(audit=before)


@pytest.mark.filterwarnings("ignore:apply. .* is given a key-value cache")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_budget_has_plain_gradients_and_fits(name: str) -> None:
    plain, ours = make(name).train(), make(name).train()
    expected, plain_peak = _step(plain, name)
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
