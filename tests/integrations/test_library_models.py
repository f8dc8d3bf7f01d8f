"""`apply` finds the blocks of models of timm, Diffusers and Transformers, and takes their own checkpointing over."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from held import Held, assert_holds_no_more_than_its_own, compare, first_tensor
from torch import Tensor, nn
from torchvision_stub import import_timm
from training import assert_equal, train_on

import actckpt
from actckpt.memory import LiveStorages

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")

#: A model, and the arguments of its forward.
Made = tuple[Any, tuple[Any, ...]]
#: How its own checkpointing is turned on.
_SWITCHES: dict[str, Callable[[Any], object]] = {
    "timm": lambda model: model.set_grad_checkpointing(),
    "diffusers": lambda model: model.enable_gradient_checkpointing(),
    "transformers": lambda model: model.gradient_checkpointing_enable(),
}


def _timm(name: str, size: int, **options: Any) -> Made:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    model = import_timm().create_model(name, pretrained=False, num_classes=10, **options)
    return model, (torch.randn(2, 3, size, size),)


def _diffusers(name: str, *inputs: Tensor, **options: Any) -> Made:
    diffusers = pytest.importorskip("diffusers")
    return getattr(diffusers, name)(norm_num_groups=8, **options), inputs


def _unet(sample: int, channels: tuple[int, ...], down: str, up: str, **options: Any) -> Made:
    kinds = {"down_block_types": down.split(), "up_block_types": up.split(), "block_out_channels": channels}
    return _diffusers("UNet2DModel", torch.randn(1, 3, sample, sample), torch.tensor(3), **kinds, **options)


def _transformers(name: str, *inputs: Tensor, **options: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)), inputs


_TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _tokens() -> Tensor:
    return torch.randint(1, 100, (4, 32))


def _conditional_unet() -> Made:
    inputs = torch.randn(1, 4, 32, 32), torch.tensor([1]), torch.randn(1, 7, 32)
    sizes = {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32, "attention_head_dim": 8}
    return _diffusers("UNet2DConditionModel", *inputs, sample_size=32, **sizes)


def _wav2vec2() -> Made:
    options = {"conv_dim": (32,) * 7, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}
    return _transformers("Wav2Vec2", torch.randn(2, 8000), **_TEXT, **options, layerdrop=0.0)


_UNCONDITIONAL = ("DownBlock2D AttnDownBlock2D DownBlock2D", "UpBlock2D AttnUpBlock2D UpBlock2D")
#: The library, how the model is made, how many blocks it has, and below which share of plain training it peaks.
_MODELS: dict[str, tuple[str, Callable[[], Made], int, float]] = {
    "swin": ("timm", partial(_timm, "swin_tiny_patch4_window7_224", 112, img_size=112, embed_dim=48), 12, 0.7),
    "maxvit": ("timm", partial(_timm, "maxvit_nano_rw_256", 128, img_size=128), 7, 0.7),
    "convnext": ("timm", partial(_timm, "convnext_atto", 96), 12, 0.7),
    "efficientnet": ("timm", partial(_timm, "efficientnet_b0", 96), 16, 0.7),
    "regnet": ("timm", partial(_timm, "regnety_002", 96), 13, 0.7),
    "vit": ("timm", partial(_timm, "vit_tiny_patch16_224", 112, img_size=112), 12, 0.7),
    "conditional unet": ("diffusers", _conditional_unet, 38, 0.7),
    "unet": ("diffusers", partial(_unet, 32, (32, 64, 64), *_UNCONDITIONAL), 23, 0.7),
    "bert": ("transformers", lambda: _transformers("Bert", _tokens(), **_TEXT), 4, 1.0),
    "segformer": ("transformers", lambda: _transformers("Segformer", torch.randn(2, 3, 128, 128)), 8, 1.0),
    "wav2vec2": ("transformers", _wav2vec2, 11, 1.0),
}
#: Such as draw random numbers.
_SMALL: dict[str, tuple[str, Callable[[], Made]]] = {
    "vit": (
        "timm",
        partial(
            *(_timm, "vit_tiny_patch16_224", 32),
            img_size=32,
            embed_dim=48,
            depth=4,
            drop_path_rate=0.2,
            proj_drop_rate=0.1,
        ),
    ),
    "unet": (
        "diffusers",
        partial(_unet, 8, (16, 32), "DownBlock2D AttnDownBlock2D", "AttnUpBlock2D UpBlock2D", dropout=0.1),
    ),
}


@pytest.mark.parametrize("name", _MODELS)
def test_the_blocks_of_a_model_hold_and_peak_no_more_than_its_own_checkpointing(name: str) -> None:
    library, make, num_blocks, of_plain = _MODELS[name]
    torch.manual_seed(0)
    model, inputs = make()
    assert_holds_no_more_than_its_own(model, inputs, _SWITCHES[library], num_blocks=num_blocks, of_plain=of_plain)


@pytest.mark.parametrize("is_on_before", [True, False])
@pytest.mark.parametrize("name", _SMALL)
def test_its_own_checkpointing_is_taken_over_and_given_back(name: str, is_on_before: bool) -> None:
    library, make = _SMALL[name]
    model, inputs = make()

    def is_on() -> bool:
        return bool(getattr(model, "grad_checkpointing" if library == "timm" else "is_gradient_checkpointing"))

    if is_on_before:
        _SWITCHES[library](model)
    actckpt.apply(model, "matmuls")
    _SWITCHES[library](model)
    first_tensor(model(*inputs)).sum().backward()
    assert not is_on() and actckpt.report(model).blocks_ran
    actckpt.remove(model)
    assert is_on()


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
@pytest.mark.parametrize("name", _SMALL)
def test_twenty_steps_are_those_of_plain_training(name: str, policy: str) -> None:
    torch.manual_seed(0)
    plain, inputs = _SMALL[name][1]()
    ours = copy.deepcopy(plain)
    actckpt.apply(ours, policy)
    found, expected = (
        train_on(model, lambda model=model: first_tensor(model(*inputs)).square().mean()) for model in (ours, plain)
    )
    assert_equal(found, expected)


def test_rows_of_rows_are_never_called_and_equal_the_layers_in_them() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"block_sizes": [2, 2, 2], "num_decoder_layers": 2, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    torch.manual_seed(0)
    model, inputs = _transformers("Funnel", _tokens(), vocab_size=100, **sizes)
    names, plain, _, ours = compare(model, inputs, None)
    by_type = copy.deepcopy(model)
    assert actckpt.apply(by_type, blocks=transformers.models.funnel.modeling_funnel.FunnelLayer) == names
    assert len(names) == 8
    named = Held(by_type, inputs)
    assert (ours.after_forward, ours.peak) == (named.after_forward, named.peak)
    assert ours.peak < 0.5 * plain.peak


def test_one_layer_that_is_called_many_times_is_one_block() -> None:
    torch.manual_seed(0)
    names, plain, _, ours = compare(*_transformers("Albert", _tokens(), **_TEXT, embedding_size=16), None)
    assert len(names) == 1 and ours.peak < 0.5 * plain.peak


class Reconstruction(nn.Module):
    """The calls of a step that trains an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        self.vae, _ = _diffusers("AutoencoderKL", block_out_channels=(32, 64), layers_per_block=2, **kinds)

    def forward(self, images: Tensor) -> Tensor:
        return self.vae.decode(self.vae.encode(images).latent_dist.mode()).sample


def test_an_autoencoder_whose_parts_are_called_in_one_forward_fits_its_budget() -> None:
    torch.manual_seed(0)
    plain, images = Reconstruction(), torch.randn(2, 3, 64, 64)
    ours = copy.deepcopy(plain)

    def step(model: nn.Module) -> tuple[list[Tensor], int]:
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            (model(images) - images).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], live.peak_bytes

    expected, plain_peak = [step(plain) for _ in range(2)][-1]
    actckpt.apply(ours, activation_budget="60%")
    for _ in range(3):
        found, peak = step(ours)
        assert_equal(found, expected)
    plan = actckpt.report(ours).plan
    assert plan is not None and peak <= plan.budget_bytes < plain_peak
