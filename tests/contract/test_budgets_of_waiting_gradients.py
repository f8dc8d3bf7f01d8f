"""Gradients that wait between the parts of a step count: of what is read past blocks, and of weights read twice."""

from __future__ import annotations

import gc

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt

DIM, VOCABULARY = 64, 2048


class Model(nn.Module):
    """Six blocks between an embedding and a head: one that is tied to it or not, with skips or without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Mlp(DIM) for _ in range(6))
        if kind == "tied":
            self.head.weight = self.embedding.weight
        self.mix = nn.Linear(2 * DIM, DIM) if kind in ("cat", "stack") else None

    def forward(self, tokens: Tensor) -> Tensor:
        x, skips = self.embedding(tokens), []
        for number, block in enumerate(self.blocks):
            if number >= 3 and self.mix is not None:
                both = [x, skips.pop()]
                x = self.mix(torch.cat(both, dim=-1) if self.kind == "cat" else torch.stack(both, dim=-1).flatten(-2))
            elif number >= 3 and self.kind == "add":
                x = x + skips.pop()
            elif number < 3:
                skips.append(x)
            x = block(x)
        return self.head(x[:, -1])


def _made(kind: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(kind), torch.randint(VOCABULARY, (2, 128))


def _step(model: Model, tokens: Tensor, *, total: bool) -> tuple[list[Tensor], int]:
    model.zero_grad()
    with counted(model, total=total, held=model.parameters()) as found:
        model(tokens).square().mean().backward()
    # Copies: gradients that the program holds count in the next step.
    return [parameter.grad.cpu().clone() for parameter in model.parameters()], found.peak_bytes


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("kind", ["tied", "add", "cat", "stack", "apart"])
def test_steps_fit_at_each_budget(kind: str, total: bool) -> None:
    expected, plain_bytes = _step(*_made(kind), total=total)

    def trained(nbytes: int) -> tuple[actckpt.Plan, int]:
        gc.collect()  # of the model before, whose bytes count on a device
        model, tokens = _made(kind)
        keyword = "budget" if total else "activation_budget"
        actckpt.apply(model, blocks=Mlp, race=False, on_infeasible="raise", **{keyword: nbytes})
        for _ in range(3):
            found, peak_bytes = _step(model, tokens, total=total)
            assert_equal(found, expected)
        plan = actckpt.report(model).plan
        assert plan is not None
        return plan, peak_bytes

    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        trained(2**20 if total else 2**16)
    least_bytes = raised.value.smallest_bytes
    del raised
    assert least_bytes is not None and least_bytes < 0.9 * plain_bytes
    for share in (0.0, 0.6):
        budget = least_bytes + round(share * (plain_bytes - least_bytes))
        plan, peak_bytes = trained(budget)
        assert peak_bytes <= 1.001 * plan.peak_bytes <= 1.001 * budget  # a loss of some bytes is not seen
