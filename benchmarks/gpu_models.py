"""The models of `gpu_budgets.py`, on a device: a Llama, a ViT and a UNet of real size, or toys of the same make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gpu_offload
import torch
from budget_models import UNet, ViT
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "REAL", "TOY", "Made", "Sizes", "made"]


class Sizes(NamedTuple):
    """How large the models are."""

    #: Of the Llama's blocks: width, heads and so on.
    llama: gpu_offload.Scale
    layers: int
    tokens: int
    vocabulary: int
    #: Width, heads, blocks; images and their side.
    vit: tuple[int, int, int]
    vit_images: tuple[int, int]
    unet_width: int
    unet_images: tuple[int, int]
    dtype: torch.dtype
    #: The Llama is that of Transformers, where it imports.
    is_transformers: bool


REAL = Sizes(
    llama=gpu_offload.Scale(),
    layers=8,
    tokens=8192,
    vocabulary=32000,
    vit=(1024, 16, 24),
    vit_images=(64, 224),
    unet_width=128,
    unet_images=(16, 256),
    dtype=torch.bfloat16,
    is_transformers=True,
)
TOY = Sizes(
    llama=gpu_offload.Scale(dim=64, heads=4, kv_heads=2, hidden=192, limit_bytes=1 << 30, min_bytes=0),
    layers=3,
    tokens=256,
    vocabulary=256,
    vit=(64, 4, 3),
    vit_images=(8, 96),
    unet_width=16,
    unet_images=(2, 48),
    dtype=torch.float32,
    is_transformers=False,
)


class Made(NamedTuple):
    """A model, and its forward up to the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]
    #: Whose it is.
    kind: str
    #: What `torch.utils.checkpoint` goes around.
    blocks: list[nn.Module]


class _Llama(nn.Module):
    """Our blocks between an embedding and a head, where Transformers is missing."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes.llama.dim
        self.embedding = nn.Embedding(sizes.vocabulary, dim)
        self.layers = nn.ModuleList(gpu_offload.Block(sizes.llama) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, S) to (B, S, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _transformers_llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    scale = sizes.llama
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=scale.dim,
        intermediate_size=scale.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        max_position_embeddings=sizes.tokens,
        attention_dropout=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def _llama(sizes: Sizes, device: torch.device) -> Made:
    kind = "ours"
    with _made_on(device, sizes.dtype):
        tokens = torch.randint(sizes.vocabulary, (1, sizes.tokens))
        if sizes.is_transformers:
            try:
                model: Any = _transformers_llama(sizes)
                loss = lambda: model(input_ids=tokens, labels=tokens).loss  # noqa: E731 - as short as a step is
                return Made(model, loss, "transformers", list(model.model.layers))
            except ImportError as error:
                kind = f"ours, since transformers does not import: {error}"
        ours = _Llama(sizes)
    return Made(ours, lambda: _cross_entropy(ours(tokens), tokens), kind, list(ours.layers))


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _vit(sizes: Sizes, device: torch.device) -> Made:
    with _made_on(device, sizes.dtype):
        number, side = sizes.vit_images
        model, images = ViT(*sizes.vit), torch.randn(number, 3, side, side)
    return Made(model, lambda: model(images).square().mean(), "budget_models", list(model.blocks))


def _unet(sizes: Sizes, device: torch.device) -> Made:
    with _made_on(device, sizes.dtype):
        number, side = sizes.unet_images
        model, images = UNet(sizes.unet_width), torch.randn(number, 3, side, side)
    blocks = [block for scale in (*model.down, *model.up) for block in scale]
    return Made(model, lambda: model(images).square().mean(), "budget_models", blocks)


_MADE: dict[str, Callable[[Sizes, torch.device], Made]] = {"llama": _llama, "vit": _vit, "unet": _unet}
MODELS = tuple(_MADE)


def made(name: str, sizes: Sizes, device: torch.device) -> Made:
    """Return a model by its name, with random weights and inputs on a device."""
    return _MADE[name](sizes, device)
