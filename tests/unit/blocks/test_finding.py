"""Which modules are taken for the blocks of a model: structures that real models have."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import actckpt
from actckpt._blocks.finding import repeated_blocks


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Block(nn.Module):
    """A transformer block of 6 layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Runs(nn.Module):
    """Modules by their names, and what runs them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _chain(model: Any, x: Tensor) -> Tensor:
    for module in model.children():
        for part in module if isinstance(module, nn.ModuleList) else [module]:
            x = _chain(part, x) if isinstance(part, nn.ModuleList) else part(x)
    return x


class Residual(nn.Module):
    """A convolution block of 4 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act(self.conv1(self.norm(x))))


class Down(nn.Module):
    """As in a U-Net of diffusion models: rows of two kinds, some of one block only."""

    def __init__(self, num_attentions: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Residual() for _ in range(2))
        self.attentions = nn.ModuleList(Block() for _ in range(num_attentions))
        self.shrink = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        for attention in self.attentions:
            x = attention(x.movedim(1, -1)).movedim(-1, 1)
        return self.shrink[0](x)


class LastDown(Down):
    """Its kind stands once in the model."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class ExpertBlock(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Attention()
        self.gate, self.experts = nn.Linear(8, num_experts), nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.experts[int(self.gate(x).sum() > 0)](x)


class Rows(nn.Module):
    """Rows of torch's modules that give tuples; recurrent ones are given the state of the one before."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        others: Any = None
        for row in self.rows:
            x, others = row(x, x, x) if isinstance(row, nn.MultiheadAttention) else row(x, others)
        return x + sum(other.sum() for other in (others if isinstance(others, tuple) else (others,)))


class LowRank(nn.Module):
    """A parametrization of more layers than what it parametrizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up(self.down(weight))


def _low_rank() -> nn.Module:
    linear = nn.Linear(8, 8)
    parametrize.register_parametrization(linear, "weight", LowRank())
    return linear


class Adapted(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.down = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up["default"](self.down["default"](x))


def _block_of_its_own_class() -> nn.Module:
    """Some libraries derive a class per module that they change."""
    block = Block()
    block.__class__ = type("Changed", (Block,), {})
    return block


class Gated(nn.Module):
    """A block with one layer: the rest is computed in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.linear(x).chunk(2, -1)
        return x + torch.sigmoid(gate) * value


class Matrices(nn.Module):
    """A block that keeps its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.up) @ self.down


class First(Block):
    """The first block of a stack is often of its own kind."""


def _each_with_tanh(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(make(), nn.Tanh()) for _ in range(3)))


def _stage(depth: int) -> nn.Module:
    return Runs(_chain, grow=nn.Linear(8, 8), blocks=nn.Sequential(*(Block() for _ in range(depth))))


def _unet() -> nn.Module:
    middle = Runs(
        lambda net, x: net.resnets[0](net.attentions[0](x.movedim(1, -1)).movedim(-1, 1)),
        resnets=nn.ModuleList([Residual()]),
        attentions=nn.ModuleList([Block()]),
    )
    return Runs(_chain, down=nn.ModuleList([Down(2), Down(2), LastDown(0)]), middle=middle)


_STEM, _HEAD = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 100))
MODELS = {
    "blocks rather than stages": (nn.Sequential(nn.Linear(8, 8), *map(_stage, (2, 2, 6, 2))), {"Block": 12}),
    "rows of one kind and groups of one": (_unet(), {"Residual": 7, "Block": 5}),
    "rows of rows": (
        Runs(_chain, rows=nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3))),
        {"Block": 6},
    ),
    "blocks rather than experts": (nn.Sequential(*(ExpertBlock(8) for _ in range(8))), {"ExpertBlock": 8}),
    "blocks rather than their parts": (nn.Sequential(*(Block() for _ in range(8))), {"Block": 8}),
    "numbered attributes": (
        Runs(_chain, stem=nn.Linear(8, 8), b1=Block(), b2=Block(), b3=Block()),
        {"Block": 3},
    ),
    "one layer that is called many times": (
        Runs(lambda net, x: net.layers[0](net.layers[0](x)), layers=nn.ModuleList([Block()])),
        {"Block": 1},
    ),
    "the first of its own kind": (nn.Sequential(First(), *(Block() for _ in range(4))), {"First": 1, "Block": 4}),
    "neither stem nor head": (nn.Sequential(_STEM, *(Block() for _ in range(4)), _HEAD), {"Block": 4}),
    "spectral norm": (_each_with_tanh(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))), {"Sequential": 3}),
    "weight norm": (_each_with_tanh(lambda: parametrizations.weight_norm(nn.Linear(8, 8))), {"Sequential": 3}),
    "norm by hooks": (_each_with_tanh(lambda: nn.utils.spectral_norm(nn.Linear(8, 8))), {"Sequential": 3}),
    "parametrized by modules": (_each_with_tanh(_low_rank), {"Sequential": 3}),
    "adapters": (_each_with_tanh(Adapted), {"Sequential": 3}),
    "a class each": (nn.Sequential(*(_block_of_its_own_class() for _ in range(3))), {"Changed": 3}),
    "one layer and a gate": (nn.Sequential(nn.Linear(8, 8), *(Gated() for _ in range(3))), {"Gated": 3}),
    "parameters of its own": (nn.Sequential(nn.Linear(8, 8), *(Matrices() for _ in range(3))), {"Matrices": 3}),
    "GRU": (Rows(lambda: nn.GRU(8, 8, batch_first=True)), {"GRU": 3}),
    "LSTM": (Rows(lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)), {"LSTM": 3}),
    "attention of torch": (Rows(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), {"MultiheadAttention": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model_are_found_and_gradients_with_them_are_bit_equal(name: str) -> None:
    model, expected_blocks = MODELS[name]
    blocks = repeated_blocks(model)
    assert Counter(type(block).__name__ for block in blocks.values()) == expected_blocks
    assert [where for where, module in model.named_modules() if blocks.get(where) is module] == list(blocks)
    x = torch.randn(2, 8, 4, 4) if name.startswith("rows of one kind") else torch.randn(2, 4, 8)
    before = copy.deepcopy(model.state_dict())
    expected = _gradients(model, x)
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    names = actckpt.apply(model)
    try:
        found = _gradients(model, x)
        assert actckpt.report(model).blocks_ran == names == tuple(blocks)
    finally:
        actckpt.remove(model)
    assert name == "blocks rather than experts" or None not in found  # experts of which none is chosen have no gradient
    assert_equal([found, model.state_dict()], [expected, after])


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True))


@pytest.fixture
def library_layer(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """The class by which Transformers marks the layers that its own checkpointing checkpoints."""
    library: Any = ModuleType("transformers.modeling_layers")
    library.GradientCheckpointingLayer = type("GradientCheckpointingLayer", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return library.GradientCheckpointingLayer


def _row_of(base: type[nn.Module], *rows: list[nn.Module]) -> nn.Module:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __init__(self, row: list[nn.Module]) -> None:
            super().__init__()
            self.layer = nn.ModuleList(row)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.layer:
                x = part(x)
            return x

    return nn.Sequential(*(Layer(row) for row in rows))


def _t5(base: type[nn.Module]) -> nn.Module:
    """Four layers as those of T5: attention and MLP in a ModuleList."""
    return _row_of(base, *([Block(), Expert()] for _ in range(4)))


def test_layers_that_transformers_checkpoints_stay_whole(library_layer: type[nn.Module]) -> None:
    assert list(repeated_blocks(_t5(library_layer))) == [str(number) for number in range(4)]
    assert set(map(type, repeated_blocks(_t5(nn.Module)).values())) == {Block, Expert}


def test_stages_that_transformers_checkpoints_give_way_to_their_blocks(library_layer: type[nn.Module]) -> None:
    stages = _row_of(library_layer, *([Block() for _ in range(depth)] for depth in (2, 2, 6, 2)))
    assert Counter(map(type, repeated_blocks(stages).values())) == {Block: 12}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_blocks_are_blocks_as_they_are_uncompiled(fullgraph: bool) -> None:
    """Their forward is an attribute of the instance."""
    blocks = nn.ModuleList([torch.compile(Block(), backend="eager", fullgraph=fullgraph) for _ in range(3)])
    assert actckpt.apply(blocks) == ("0", "1", "2")
    actckpt.remove(blocks)
    assert actckpt.apply(blocks, blocks=["1"]) == ("1",)


class Scaled(nn.Linear):
    """A layer of torch, a bit different: run again by itself it saves nothing."""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _attributes() -> nn.Module:
    model = nn.Module()
    model.cell1, model.cell2 = Matrices(), Matrices()
    return model


def _row(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.ModuleList(layer() for _ in range(3))


@pytest.mark.parametrize(
    "model",
    [
        *map(_row, (lambda: nn.Linear(4, 4), lambda: Scaled(4, 4), lambda: nn.LazyLinear(4))),
        _row(lambda: parametrizations.weight_norm(nn.Linear(4, 4))),
        _row(lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 3))),
        nn.Sequential(Norm(), Norm(), Norm()),
        _attributes(),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])]),
    ],
)
def test_rows_of_layers_norms_and_attributes_are_no_blocks(model: nn.Module) -> None:
    assert repeated_blocks(model) == {}
