"""Models for the benchmarks of budgets: a Llama, a ViT, a UNet and a mixture of experts, with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from actckpt.demo import LanguageModel

__all__ = ["MODELS", "MoE", "UNet", "ViT"]


class _ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 16 x 16, blocks, and a head of 100 classes."""

    def __init__(self, dim: int = 192, heads: int = 3, layers: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.ModuleList(_ViTBlock(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        return x + self.conv2(functional.silu(self.norm2(h)))


class UNet(nn.Module):
    """Three scales; results of the way down are read on the way up."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(nn.ModuleList(_ConvBlock(w) for _ in range(blocks)) for w in widths)
        self.up = nn.ModuleList(nn.ModuleList(_ConvBlock(w) for _ in range(blocks)) for w in widths[:-1])
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in itertools.pairwise(widths))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for scale, blocks in enumerate(self.down):
            for block in blocks:
                x = block(x)
            if scale < len(self.narrow):
                skips.append(x)
                x = self.narrow[scale](x)
        for scale in reversed(range(len(self.up))):
            x = self.widen[scale](x) + skips.pop()
            for block in self.up[scale]:
                x = block(x)
        return self.head(x)


class _Experts(nn.Module):
    """Each token goes to two of the experts."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class _MoEBlock(_ViTBlock):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        del self.up, self.down
        self.mlp = _Experts(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class MoE(nn.Module):
    """A decoder with four experts in each block, on 256 different tokens."""

    def __init__(self, dim: int = 128, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(_MoEBlock(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _llama() -> tuple[nn.Module, Callable[[], object]]:
    model = LanguageModel(layers=8, dim=128, heads=4, kv_heads=2, seq=256, dropout=0.1)
    tokens = torch.randint(256, (4, 256))
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def _vit() -> tuple[nn.Module, Callable[[], object]]:
    model, images = ViT(), torch.randn(8, 3, 224, 224)
    return model, lambda: model(images).square().mean().backward()


def _unet() -> tuple[nn.Module, Callable[[], object]]:
    model, images = UNet(), torch.randn(2, 3, 96, 96)
    return model, lambda: model(images).square().mean().backward()


def _moe() -> tuple[nn.Module, Callable[[], object]]:
    model, tokens = MoE(), torch.randint(256, (8, 256))
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


#: By name: makes a model and its training step, which leaves gradients.
MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], object]]]] = {
    "llama": _llama,
    "vit": _vit,
    "unet": _unet,
    "moe": _moe,
}
