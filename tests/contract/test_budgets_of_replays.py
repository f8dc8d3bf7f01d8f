"""Replays compute on the way what backward does not read: more at once than a block needs of which all is kept."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from torch import Tensor, nn
from torch.nn import functional

import actckpt


class Adapted(nn.Module):
    """A frozen layer beside a small one that is trained; of the two results that are added, backward reads none."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(functional.dropout(x, 0.05, self.training)))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.mixed, self.wide = Adapted(dim, 3 * dim), Adapted(dim, dim), Adapted(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)
        for module in (self.first, self.second, self.out):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, dim=-1))
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(attention.transpose(1, 2).flatten(2))
        return x + self.out(functional.silu(self.wide(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.head = nn.Linear(64, 250)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _trained(model: nn.Module, steps: int) -> list[tuple[list[Tensor], int]]:
    """Return gradients and peak of each step."""
    tokens = torch.randint(100, (8, 64), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        model.zero_grad()
        with counted(model, total=False) as count:
            model(tokens)["loss"].backward()
        found.append(([p.grad.clone() for p in model.parameters() if p.requires_grad], count.peak_bytes))
    return found


def test_budgets_hold_where_replays_need_more_than_what_is_kept() -> None:
    expected = _trained(_model(), 4)
    plain_bytes = expected[-1][1]
    model = _model()
    actckpt.apply(model, blocks=Block, activation_budget=1, race=False, on_infeasible="raise")
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        _trained(model, 2)
    smallest_bytes = raised.value.smallest_bytes
    assert smallest_bytes is not None and smallest_bytes < 0.6 * plain_bytes
    for share in range(2):
        budget = smallest_bytes + (plain_bytes - smallest_bytes) * share // 2
        model = _model()
        actckpt.apply(model, blocks=Block, activation_budget=budget, race=False, on_infeasible="raise")
        found = _trained(model, 4)
        for (gradients, _), (others, _) in zip(found, expected, strict=True):
            assert_equal(gradients, others)
        assert max(peak for _, peak in found[1:]) <= budget
        plan = actckpt.report(model).plan
        assert plan is not None and plan.overhead_seconds > 0.0 and plan.peak_bytes <= budget
