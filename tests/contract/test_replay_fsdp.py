"""Two FSDP2 ranks on gloo: regions inside each unit are right, one around several units says what to do."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import actckpt

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torch.distributed with gloo"
)


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


def _check(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        expected = _gradients("keep", around=False)
        for policy in ("recompute", ["aten.addmm"], "offload"):
            for left, right in zip(_gradients(policy, around=False), expected, strict=True):
                assert torch.equal(left, right), policy
        with pytest.raises(
            actckpt.SavedTensorChangedError,
            match=r"(?s)the parameter [012]\.layers\.[02]\.(weight|bias) of.*FSDP2 frees.*inside each unit",
        ):
            _gradients("recompute", around=True)
    finally:
        dist.destroy_process_group()


def test_rule_8_regions_inside_fsdp2_units_and_around_them() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_check, args=(port,), nprocs=2)


def test_rule_8_the_error_names_the_parameter_as_the_whole_model_knows_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    weight = model[0][0].weight
    with actckpt.region():
        loss = (model(torch.ones(2, 3)) * weight.exp().sum()).sum()
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    with pytest.raises(
        actckpt.SavedTensorChangedError, match=rf"the parameter 0\.0\.weight of.* 0 bytes now; {size} were"
    ):
        loss.backward()


def test_rule_8_a_tensor_that_is_no_parameter_gets_no_name() -> None:
    x = torch.ones(2, 3)
    y = torch.ones(2, 3, requires_grad=True)
    with actckpt.region():
        loss = ((x * 2) * y).sum()
    x.untyped_storage().resize_(0)
    with pytest.raises(actckpt.SavedTensorChangedError, match="Backward needs an input of shape"):
        loss.backward()
