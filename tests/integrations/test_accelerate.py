"""`apply` before `Accelerator.prepare`; test_trainer_sharded.py shards what it prepares."""

from __future__ import annotations

import pytest
import torch
from training import STEPS, assert_equal
from transformers_models import batch, make

import actckpt

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_apply_before_prepare_trains_as_plain_also_with_accumulation(policy: str) -> None:
    def run(*, applies: bool) -> list[torch.Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make("llama")
        if applies:
            actckpt.apply(model, policy)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        torch.manual_seed(2)
        losses = []
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                loss = model(**batch("llama"), use_cache=False).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    assert_equal(run(applies=True), run(applies=False))
