"""Whole models in a region: gradients, buffers and random states are those of plain autograd, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from transformer_block import Residual

import actckpt
from actckpt.demo import LanguageModel


def _by_shape(info: Any) -> Any:
    return list(actckpt.Action)[sum(info.shape) % 3]


def _torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "recompute": "recompute",
    "offload": "offload",
    "keep matmuls": [torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm],
    "offload matmuls": actckpt.policies.PerOp({"aten.mm": "offload", "aten.addmm": "offload"}),
    "keep batch norm": ["aten.native_batch_norm", "aten.relu_"],
    "by shape": _by_shape,
    "torch": _torch_policy,
}


def _through_fresh_modules(model: nn.Module) -> Tensor:
    x = torch.randn(3, 4)
    for _ in range(3):
        fresh = nn.Linear(4, 4)
        fresh.weight.requires_grad_(False)
        x = fresh(model(x)).tanh()
        del fresh
    return x.sum()


def _by_other_ways_in_each_step(model: nn.Module) -> Tensor:
    x = torch.randn(3, 4)
    for _ in range(int(torch.randint(1, 5, ()))):
        x = model(x).relu_() if x.sum() > 0 else model(x).sin() * torch.rand(4)
    return x.square().sum()


def _through_lstm(model: nn.Module) -> Tensor:
    out, (h, c) = model(torch.randn(5, 2, 4))
    return out.square().sum() + (h * c).sum()


#: How to make a model, the loss of a step, and how many steps.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int]] = {
    "resnet with batch norm and in-place relu": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Residual(4)),
        lambda model: model(torch.randn(2, 3, 12, 12)).square().mean(),
        2,
    ),
    "lstm": (lambda: nn.LSTM(4, 6, num_layers=2, dropout=0.3), _through_lstm, 2),
    "demo": (
        lambda: LanguageModel(layers=2, dim=16, heads=4, kv_heads=2, seq=8, dropout=0.1),
        lambda model: model(torch.randint(256, (2, 8))).square().mean(),
        2,
    ),
    "modules that are freed and made again": (lambda: nn.Linear(4, 4), _through_fresh_modules, 3),
    "control flow that differs between steps": (lambda: nn.Linear(4, 4), _by_other_ways_in_each_step, 6),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_without_a_region(name: str, policy: str) -> None:
    """From one seed, losses, gradients, buffers and random states are bit-equal."""
    make, loss_of, steps = MODELS[name]
    results = []
    for region in (nullcontext, lambda: actckpt.region(POLICIES[policy])):
        torch.manual_seed(7)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        result: list[Any] = []
        for _ in range(steps):
            optimizer.zero_grad()
            with region():
                loss = loss_of(model)
            loss.backward()
            result += [loss.detach().clone(), [None if g is None else g.clone() for g in gradients(model)]]
            optimizer.step()
        results.append([*result, [b.clone() for b in model.buffers()], torch.get_rng_state()])
    assert_equal(results[1], results[0])
