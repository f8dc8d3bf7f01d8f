"""Two FSDP2 ranks on gloo: regions inside each unit are right, one around several units says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, run_on_two_ranks
from torch import nn

import actckpt

pytestmark = needs_gloo


class Unit(nn.Module):
    """A feed-forward block with a region of its own, if it has a policy."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())
        self.policy = policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.policy is None:
            return x + self.layers(x)
        with actckpt.region(self.policy):
            return x + self.layers(x).sin()


def _gradients(policy: Any, *, around: bool) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(*(Unit(None if around else policy) for _ in range(3)))
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    x = torch.randn(4, 8) + dist.get_rank()
    if around:
        with actckpt.region(policy):
            loss = model(x).square().sum()
    else:
        loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _check() -> None:
    expected = _gradients("keep", around=False)
    for policy in ("recompute", ["aten.addmm"], "offload"):
        for left, right in zip(_gradients(policy, around=False), expected, strict=True):
            assert torch.equal(left, right), policy
    with pytest.raises(
        actckpt.errors.SavedTensorChangedError,
        match=r"(?s)of shape .* has 0 bytes now.*FSDP2 frees.*inside each unit",
    ):
        _gradients("recompute", around=True)


def test_rule_8_regions_inside_fsdp2_units_and_around_them(tmp_path: Path) -> None:
    run_on_two_ranks(_check, tmp_path)


def test_rule_8_the_error_tells_the_shape_of_the_parameter() -> None:
    model = nn.Linear(3, 4)
    weight = model.weight
    with actckpt.region():
        loss = (model(torch.ones(2, 3)) * weight.exp().sum()).sum()
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    with pytest.raises(
        actckpt.errors.SavedTensorChangedError, match=rf"a parameter of shape \(4, 3\), .* 0 bytes now; {size} were"
    ):
        loss.backward()


def test_rule_8_the_error_tells_an_input_from_a_parameter() -> None:
    x = torch.ones(2, 3)
    y = torch.ones(2, 3, requires_grad=True)
    with actckpt.region():
        loss = ((x * 2) * y).sum()
    x.untyped_storage().resize_(0)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="Backward needs an input of shape"):
        loss.backward()
