"""Gradients that wait between the parts of a step count: of what is read past blocks, and of weights read twice."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt
from actckpt._budget.outside_graph import OutsideGraph, Read

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

    with pytest.raises(actckpt.PlanInfeasibleError) as raised:
        trained(2**20 if total else 2**16)
    least_bytes = raised.value.smallest_bytes
    del raised
    assert least_bytes is not None and least_bytes < 0.9 * plain_bytes
    for share in (0.0, 0.6):
        budget = least_bytes + round(share * (plain_bytes - least_bytes))
        plan, peak_bytes = trained(budget)
        assert peak_bytes <= 1.001 * plan.peak_bytes <= 1.001 * budget  # a loss of some bytes is not seen


@pytest.mark.parametrize("kind", ["cat", "stack"])
def test_what_is_read_where_is_told_by_position(kind: str) -> None:
    model, tokens = _made(kind)
    graph = OutsideGraph(model)

    class Watched(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            graph.call_begins(x)
            x = self.block(x)
            graph.call_ended()
            return x

    plain = model.blocks
    model.blocks = nn.ModuleList(map(Watched, plain))
    read = graph.read([model(tokens)])
    mixed = ("mix.weight", "mix.bias")
    assert [set(names) for names in read.parameters[::2]] == [
        {"embedding.weight"},
        set(),
        set(),
        *[set(mixed)] * 3,
        {"head.weight"},
    ]
    assert not any(read.parameters[1::2])
    # Each skip is made before one of the first three calls, and read before one of the last three. Its gradient is a
    # view of that of what it is part of, which has twice its bytes.
    one = 2 * 128 * DIM * 4
    assert [nbytes / one for nbytes in read.waiting_bytes[1::2]] == [2, 4, 6, 4, 2, 0]


def _read(*given: Tensor, outputs: Tensor) -> Read:
    graph = OutsideGraph(nn.Linear(1, 1))
    for each in given:
        graph.call_begins(each)
        graph.call_ended()
    return graph.read([outputs])


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nested.to_padded_tensor(2 * torch.nested.nested_tensor(rows, requires_grad=True), 0.0)


def _values(rows: list[Tensor]) -> Tensor:
    return (2 * torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)).values()


def _product(_: list[Tensor]) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse().requires_grad_(), torch.ones(4, 4, requires_grad=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("made", [_padded, _values, _product], ids=["strided", "jagged", "sparse"])
def test_tensors_whose_bytes_torch_does_not_tell_stop_nothing(made: Callable[[list[Tensor]], Tensor]) -> None:
    output = made([torch.ones(2, 4), torch.ones(3, 4)])
    assert len(_read(output, outputs=output.sum()).waiting_bytes) == 3


class _Named(torch.autograd.Function):
    """Keeps things in its context under names that nodes have, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name, ctx.variable = "twice", x.detach()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_what_a_function_keeps_in_its_context_is_not_taken_for_the_nodes_own() -> None:
    x = torch.ones(4, requires_grad=True)
    read = _read(x, outputs=_Named.apply(x + 1).sum())
    assert read.waiting_bytes == _read(x, outputs=((x + 1) * 2).sum()).waiting_bytes


def test_a_graph_that_is_deep_can_be_freed() -> None:
    """torch needs stack for each node in a row that Python has seen: without an end to the walk, the process dies."""
    program = """
import torch
from actckpt._budget.outside_graph import OutsideGraph
x = torch.ones(1, requires_grad=True)
for _ in range(200_000):
    x = x + 1
OutsideGraph(torch.nn.Linear(1, 1)).read([x])
del x
print("freed")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("freed\n", 0), found.stderr


def test_nothing_is_held_once_it_was_read_and_calls_that_failed_are_none() -> None:
    weight = torch.ones(4, requires_grad=True)
    graph = OutsideGraph(nn.Linear(1, 1))
    x = weight * 2
    graph.call_begins(x)  # which fails
    graph.call_begins(x)
    y = x.exp()
    graph.call_ended()
    read = graph.read([y * x])
    # Of the leaf it waits from where it is read, and x is read past the call.
    assert read.waiting_bytes == (0, x.nbytes, 0)
    later = (weight * 2).exp()
    graph.call_begins(later)
    graph.call_ended()
    gone = weakref.ref(later.untyped_storage())
    del later
    gc.collect()
    assert gone() is None
