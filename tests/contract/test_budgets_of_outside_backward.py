"""What backward needs outside of blocks counts: of heads that are larger than outputs, of stems, between blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import assert_equal
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt
from actckpt.memory import LiveStorages

DIM, WIDE = 32, 512


class Wide(nn.Module):
    """Needs much more than a block, and returns little."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "square":  # saves what it is given
            return self.down(x * x)
        if self.kind == "views":
            return self.down(x.sin().unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1))
        return self.down(x.sigmoid().exp())  # both save their results


class Model(nn.Module):
    def __init__(self, where: str, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.wide = where, Wide(kind)
        self.blocks = nn.ModuleList(Mlp(DIM) for _ in range(4))
        self.x = torch.randn(64, DIM)

    def forward(self) -> Tensor:
        x = self.wide(self.x) if self.where == "stem" else self.x
        for number, block in enumerate(self.blocks):
            x = block(self.wide(x) if self.where == "between" and number == 2 else x)
        return self.wide(x)[:, :1] if self.where == "head" else x[:, :1]

    def step(self) -> tuple[list[Tensor], int]:
        """Return gradients and peak."""
        self.zero_grad()
        with LiveStorages(parameters=self.parameters()) as live:
            self().square().mean().backward()
        return [parameter.grad.clone() for parameter in self.parameters()], live.peak_bytes


@pytest.mark.parametrize(
    ("where", "kind"), list(itertools.product(["head", "stem", "between"], ["square", "views", "results"]))
)
def test_what_backward_needs_outside_of_blocks_is_known_before_it_runs(where: str, kind: str) -> None:
    expected, plain_bytes = Model(where, kind).step()
    for share in ("100%", "1B"):
        model = Model(where, kind)
        actckpt.apply(model, activation_budget=share, on_infeasible="raise")
        model.step()
        try:
            gradients, _ = model.step()
        except actckpt.errors.PlanInfeasibleError as error:
            assert error.smallest_bytes is not None
            actckpt.remove(model)
            actckpt.apply(model, activation_budget=int(error.smallest_bytes) + 1, on_infeasible="raise")
            model.step()
            gradients, _ = model.step()
        assert_equal(gradients, expected)
        _, peak = model.step()
        plan = actckpt.report(model).plan
        assert plan is not None
        assert peak <= plan.budget_bytes
        weight = 4 * DIM * WIDE  # its gradient may be there at any time
        assert peak >= 0.95 * (plan.peak_bytes - weight)  # nor is it taken to be much more
        assert share != "100%" or plan.peak_bytes >= plain_bytes


def test_nothing_that_was_saved_is_unpacked_to_see_what_backward_needs() -> None:
    model = Model("head", "results")
    actckpt.apply(model, activation_budget="90%", on_infeasible="raise")
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = model().square().mean()
        assert not unpacked
    loss.backward()
    assert unpacked


@pytest.mark.parametrize("where", ["stem", "head"])
def test_the_gradient_of_a_large_weight_outside_of_blocks_counts_once(where: str) -> None:
    """With few rows it is most of a step."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = [Mlp(DIM) for _ in range(4)]
        return (
            nn.Sequential(nn.Linear(4096, DIM), *blocks)
            if where == "stem"
            else nn.Sequential(*blocks, nn.Linear(DIM, 4096))
        )

    def step(model: nn.Sequential) -> int:
        model.zero_grad()
        x = torch.ones(8, model[0].in_features if where == "stem" else DIM)
        with LiveStorages(parameters=model.parameters()) as live:
            model(x).square().mean().backward()
        return live.peak_bytes

    plain_bytes, planned = step(model()), model()
    actckpt.apply(planned, blocks=Mlp, activation_budget="100%", race=False, on_infeasible="raise")
    peaks = [step(planned) for _ in range(3)]
    plan = actckpt.report(planned).plan
    assert plan is not None and plan.budget_bytes < 1.1 * plain_bytes
    assert peaks[-1] <= plan.budget_bytes + 8, "the loss and its gradient"
