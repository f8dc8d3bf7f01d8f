"""Small training programs for budgets: each makes a model and a step that runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PROGRAMS", "Program"]

#: A model, and its step. The step sets no gradients to None.
Program = tuple[nn.Module, Callable[[], object]]

_WIDTH, _TOKENS, _VOCABULARY = 32, 64, 128


class _Block(nn.Module):
    def __init__(self, *, memory: bool = False, rank: int = 0) -> None:
        super().__init__()
        linear: Callable[[int, int], nn.Module] = (lambda a, b: _LowRank(a, b, rank)) if rank else nn.Linear
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = linear(_WIDTH, 3 * _WIDTH), linear(_WIDTH, _WIDTH)
        self.up, self.down = linear(_WIDTH, 4 * _WIDTH), linear(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.memory = nn.Linear(_WIDTH, _WIDTH) if memory else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        if self.memory is not None and memory is not None:
            x = x + self.memory(memory)
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class _LowRank(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, a: int, b: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(a, b).requires_grad_(False)
        self.a, self.b = nn.Linear(a, rank, bias=False), nn.Linear(rank, b, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class _Language(nn.Module):
    """Decoder blocks under a head that shares its weight with the embedding."""

    def __init__(self, *, rank: int = 0, casts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block(rank=rank) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(not rank)
        self.casts = casts

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts or torch.is_autocast_enabled("cpu")):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))


class _Translation(nn.Module):
    """An encoder whose result every block of the decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.encoder = nn.ModuleList(_Block() for _ in range(3))
        self.decoder = nn.ModuleList(_Block(memory=True) for _ in range(3))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embedding(source), self.embedding(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class _Convolution(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


class _Skips(nn.Module):
    """A stack whose first half is read again by the second half, as in a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.blocks = nn.ModuleList(_Convolution(8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for number, block in enumerate(self.blocks):
            if number < 3:
                x = block(x)
                skips.append(x)
            else:
                x = block(x + skips.pop())
        return self.head(x)


class _Experts(nn.Module):
    """Blocks that route each token to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route, self.norm = nn.Linear(_WIDTH, 2), nn.LayerNorm(_WIDTH)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weight, chosen = self.route(h).softmax(-1).max(-1)
        result = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, torch.tanh(expert(h[rows])) * weight[rows, None])
        return x + result.view_as(x)


def _tokens(rows: int = 8) -> Tensor:
    return torch.randint(_VOCABULARY, (rows, _TOKENS))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _language(**options: Any) -> Program:
    model, tokens = _Language(**options), _tokens()
    return model, lambda: _loss(model(tokens), tokens).backward()


def _autocast_outside() -> Program:
    model, tokens = _Language(), _tokens()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model(tokens), tokens)
        loss.backward()

    return model, step


def _micro_batches_in_one_autocast() -> Program:
    model, batches = _Language(), [_tokens(4) for _ in range(3)]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for tokens in batches:
                (_loss(model(tokens), tokens) / 3).backward()

    return model, step


def _pairs() -> Program:
    model, chosen, rejected = _Language(), _tokens(4), _tokens(4)

    def step() -> None:
        better, worse = (_loss(model(tokens), tokens) for tokens in (chosen, rejected))
        functional.softplus(better - worse).backward()

    return model, step


def _chunked_loss() -> Program:
    """The loss is computed in chunks, on outputs that are detached."""
    model, tokens = _Language(), _tokens()

    def step() -> None:
        logits = model(tokens)
        leaf = logits.detach().requires_grad_()
        for part, labels in zip(leaf.chunk(4), tokens.chunk(4), strict=True):
            _loss(part, labels).backward()
        logits.backward(leaf.grad)

    return model, step


def _retained() -> Program:
    model, tokens = _Language(), _tokens()

    def step() -> None:
        logits = model(tokens)
        _loss(logits, tokens).backward(retain_graph=True)
        (1e-4 * logits.float().square().mean()).backward()

    return model, step


def _pipeline() -> Program:
    """One forward, one backward, with three forwards alive (1F1B)."""
    model, batches = _Language(), [_tokens(4) for _ in range(5)]

    def step() -> None:
        alive: list[Tensor] = []
        for tokens in batches:
            alive.append(_loss(model(tokens), tokens))
            if len(alive) == 3:
                alive.pop(0).backward()
        for loss in alive:
            loss.backward()

    return model, step


def _translation() -> Program:
    model, source, target = _Translation(), _tokens(), _tokens()
    return model, lambda: _loss(model(source, target), target).backward()


def _skips() -> Program:
    model, images = _Skips(), torch.randn(4, 3, 24, 24)
    return model, lambda: functional.mse_loss(model(images), images).backward()


def _experts() -> Program:
    model, x = _Experts(), torch.randn(8, _TOKENS, _WIDTH)
    return model, lambda: model(x).square().mean().backward()


def _forces() -> Program:
    """The loss contains a gradient of the output: backward runs through a backward."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, 128), nn.Tanh(), nn.Linear(128, _WIDTH)) for _ in range(4)))
    positions = torch.randn(256, _WIDTH).requires_grad_()

    def step() -> None:
        positions.grad = None
        energy = model(positions).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        (1e-3 * energy + forces.square().sum()).backward()

    return model, step


PROGRAMS: dict[str, Callable[[], Program]] = {
    "language": _language,
    "autocast inside": lambda: _language(casts=True),
    "autocast outside": _autocast_outside,
    "low rank": lambda: _language(rank=4),
    "micro-batches in one autocast": _micro_batches_in_one_autocast,
    "two forwards in one loss": _pairs,
    "chunked loss": _chunked_loss,
    "retained graph": _retained,
    "pipeline": _pipeline,
    "encoder and decoder": _translation,
    "skips": _skips,
    "experts": _experts,
    "forces": _forces,
}
