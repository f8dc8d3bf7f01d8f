"""Models of real size on a device, or toys of the same make: Llama, ViT, UNet, mixture of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from budget_models import MoE, UNet, ViT
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LLAMA", "LLAMA_8B", "MOE", "UNET", "VIT", "Block", "Built", "Sizes", "build", "shared_copy", "toy"]


class Sizes(NamedTuple):
    """Which model, and how large it is."""

    kind: str
    layers: int
    #: Of a sequence; of images: how many.
    tokens: int
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 32000
    #: Side of images.
    side: int = 224
    dtype: str = "bfloat16"
    #: The Llama is that of Transformers, where it imports.
    is_transformers: bool = True


LLAMA = Sizes("llama", layers=8, tokens=8192)
LLAMA_8B = Sizes("llama", layers=32, tokens=16384, vocabulary=128256)
VIT = Sizes("vit", layers=24, tokens=64, dim=1024, heads=16)
UNET = Sizes("unet", layers=2, tokens=16, dim=128, side=256)
MOE = Sizes("moe", layers=8, tokens=8192, dim=2048, heads=16)


def toy(sizes: Sizes) -> Sizes:
    """Return sizes for a rehearsal."""
    layers = 4 if sizes.kind == "moe" else min(sizes.layers, 3)
    few = {"layers": layers, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 192, "dtype": "float32"}
    if sizes.kind == "unet":
        few |= {"layers": 1, "dim": 16, "side": 48}
    if sizes.kind == "vit":
        few["side"] = 96
    tokens = min(sizes.tokens // 32, 512) if sizes.tokens > 64 else max(sizes.tokens // 8, 1)
    return sizes._replace(**few, tokens=tokens, vocabulary=256, is_transformers=False)


class Built(NamedTuple):
    """A model, and its forward up to the loss."""

    model: nn.Module
    #: Takes the model, or a copy of it.
    loss: Callable[[Any], Tensor]
    #: Whose model it is.
    kind: str
    #: Names of the modules that `torch.utils.checkpoint` goes around.
    block_names: list[str]

    def blocks(self, model: nn.Module) -> list[Any]:
        """Return the blocks of the model, or of a copy of it."""
        return [model.get_submodule(name) for name in self.block_names]


class Block(nn.Module):
    """A decoder block of the shape of Llama 3 8B's, without rotation."""

    def __init__(self, sizes: Sizes = LLAMA) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden
        self.head = dim // sizes.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, sizes.kv_heads * self.head, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shape (1, tokens, dim)."""
        h = self.attention_norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class _Llama(nn.Module):
    """Our blocks between an embedding and a head, where Transformers is missing."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.lm_head = nn.RMSNorm(sizes.dim), nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, S) to (B, S, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out


def _transformers_llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.dim,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.tokens,
        attention_dropout=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def _token_loss(tokens: Tensor) -> Callable[[Any], Tensor]:
    return lambda model: functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _image_loss(images: Tensor) -> Callable[[Any], Tensor]:
    return lambda model: model(images).square().mean()


def _llama(sizes: Sizes) -> Built:
    kind, tokens = "ours", torch.randint(sizes.vocabulary, (1, sizes.tokens))
    if sizes.is_transformers:
        try:
            model = _transformers_llama(sizes)
        except ImportError as error:
            kind = f"ours, since transformers does not import: {error}"
        else:
            names = [f"model.layers.{number}" for number in range(sizes.layers)]
            return Built(model, lambda m: m(input_ids=tokens, labels=tokens).loss, "transformers", names)
    return Built(_Llama(sizes), _token_loss(tokens), kind, [f"layers.{number}" for number in range(sizes.layers)])


def _vit(sizes: Sizes) -> Built:
    model, images = ViT(sizes.dim, sizes.heads, sizes.layers), torch.randn(sizes.tokens, 3, sizes.side, sizes.side)
    return Built(model, _image_loss(images), "budget_models", [f"blocks.{number}" for number in range(sizes.layers)])


def _unet(sizes: Sizes) -> Built:
    model, images = UNet(sizes.dim, sizes.layers), torch.randn(sizes.tokens, 3, sizes.side, sizes.side)
    names = [name for name, _ in model.named_modules() if name.startswith(("down.", "up.")) and name.count(".") == 2]
    return Built(model, _image_loss(images), "budget_models", names)


def _moe(sizes: Sizes) -> Built:
    model, tokens = MoE(sizes.dim, sizes.heads, sizes.layers), torch.randint(256, (sizes.tokens // 256 or 1, 256))
    return Built(model, _token_loss(tokens), "budget_models", [f"layers.{number}" for number in range(sizes.layers)])


_BUILDERS: dict[str, Callable[[Sizes], Built]] = {"llama": _llama, "vit": _vit, "unet": _unet, "moe": _moe}


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def build(sizes: Sizes, device: torch.device) -> Built:
    """Return a model with random weights and inputs on a device."""
    with _defaults(device, getattr(torch, sizes.dtype)):
        return _BUILDERS[sizes.kind](sizes)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules, with the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
