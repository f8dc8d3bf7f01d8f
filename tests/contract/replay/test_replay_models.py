"""Whole models in a region: gradients, buffers and random states are those of plain autograd, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal, gradients
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt.demo import LanguageModel

Region = Callable[[], Any]


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
with_every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def assert_trains_as_plain(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module, Region], Tensor], policy: Any, steps: int = 2
) -> None:
    """Train with and without regions from one seed: losses, gradients, buffers and random states are bit-equal."""
    results = []
    for region in (nullcontext, lambda: actckpt.region(policy)):
        torch.manual_seed(7)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        result: list[Any] = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = forward(model, region)
            loss.backward()
            result += [loss.detach().clone(), [None if g is None else g.clone() for g in gradients(model)]]
            optimizer.step()
        results.append([*result, [b.clone() for b in model.buffers()], torch.get_rng_state()])
    assert_equal(results[1], results[0])


class Residual(nn.Module):
    """Two convolutions, BatchNorm and in-place ReLU around a shortcut, as in torchvision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@with_every_policy
def test_resnet_with_batch_norm_and_in_place_relu_updates_statistics_once(policy: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), Residual(4), Residual(4))

    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            return model(torch.randn(2, 3, 12, 12)).square().mean()

    assert_trains_as_plain(make, forward, policy)


@with_every_policy
def test_lstm(policy: Any) -> None:
    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            out, (h, c) = model(torch.randn(5, 2, 4))
            return out.square().sum() + (h * c).sum()

    assert_trains_as_plain(lambda: nn.LSTM(4, 6, num_layers=2, dropout=0.3), forward, policy)


class UNet(nn.Module):
    """One level down and up again, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.first(x))
        low = F.group_norm(self.down(F.avg_pool2d(skip, 2)), 2).relu_()
        return self.last(torch.cat([skip, self.up(low)], 1))


@with_every_policy
def test_unet_with_skips(policy: Any) -> None:
    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            return model(torch.randn(2, 1, 8, 8)).abs().mean()

    assert_trains_as_plain(UNet, forward, policy)


class Experts(nn.Module):
    """Each row goes to the expert that its numbers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


@with_every_policy
def test_mixture_of_experts_routes_as_its_data_says(policy: Any) -> None:
    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            return model(torch.randn(9, 4)).square().sum()

    assert_trains_as_plain(Experts, forward, policy, steps=4)


@with_every_policy
def test_the_model_of_the_demo(policy: Any) -> None:
    def make() -> nn.Module:
        return LanguageModel(layers=2, dim=16, heads=4, kv_heads=2, seq=8, dropout=0.1)

    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            return model(torch.randint(256, (2, 8))).square().mean()

    assert_trains_as_plain(make, forward, policy)


@with_every_policy
def test_modules_that_are_freed_and_made_again(policy: Any) -> None:
    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            x = torch.randn(3, 4)
            for _ in range(3):
                fresh = nn.Linear(4, 4)
                fresh.weight.requires_grad_(False)
                x = fresh(model(x)).tanh()
                del fresh
            return x.sum()

    assert_trains_as_plain(lambda: nn.Linear(4, 4), forward, policy, steps=3)


@with_every_policy
def test_control_flow_that_differs_between_steps(policy: Any) -> None:
    def forward(model: nn.Module, region: Region) -> Tensor:
        with region():
            x = torch.randn(3, 4)
            for _ in range(int(torch.randint(1, 5, ()))):
                x = model(x).relu_() if x.sum() > 0 else model(x).sin() * torch.rand(4)
            return x.square().sum()

    assert_trains_as_plain(lambda: nn.Linear(4, 4), forward, policy, steps=6)
