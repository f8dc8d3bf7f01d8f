"""`apply` finds the blocks of the U-Nets of diffusers, and holds no more than their own checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from held import assert_holds_no_more_than_its_own
from torch import Tensor, nn
from training import assert_equal, train_on

import actckpt
from actckpt.memory import LiveStorages

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")


def _conditional() -> Any:
    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64, 64, 64),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, (torch.randn(1, 4, 32, 32), torch.tensor([1]), torch.randn(1, 7, 32)), 38


def _unconditional() -> Any:
    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    return model, (torch.randn(1, 3, 32, 32), torch.tensor(3)), 23


@pytest.mark.parametrize("made", [_conditional, _unconditional])
def test_the_blocks_of_a_unet_hold_and_peak_no_more_than_its_own_checkpointing(made: Any) -> None:
    torch.manual_seed(0)
    model, inputs, num_blocks = made()
    assert_holds_no_more_than_its_own(
        model, inputs, lambda model: model.enable_gradient_checkpointing(), num_blocks=num_blocks, of_plain=0.7
    )


def test_the_own_checkpointing_of_a_unet_is_taken_over_and_given_back() -> None:
    model, inputs, _ = _unconditional()
    for is_on_before in (True, False):
        if is_on_before:
            model.enable_gradient_checkpointing()
        actckpt.apply(model, "matmuls")
        model.enable_gradient_checkpointing()
        model(*inputs).sample.sum().backward()
        assert not model.is_gradient_checkpointing and actckpt.report(model).blocks_ran
        actckpt.remove(model)
        assert model.is_gradient_checkpointing


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_twenty_steps_of_a_unet_are_those_of_plain_training(policy: str) -> None:
    torch.manual_seed(0)
    plain = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    ours, inputs = copy.deepcopy(plain), (torch.randn(1, 3, 8, 8), torch.tensor(3))
    actckpt.apply(ours, policy)
    found, expected = (
        train_on(model, lambda model=model: model(*inputs).sample.square().mean()) for model in (ours, plain)
    )
    assert_equal(found, expected)


class Reconstruction(nn.Module):
    """The calls of a step that trains an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = diffusers.AutoencoderKL(
            block_out_channels=(32, 64),
            layers_per_block=2,
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.vae.decode(self.vae.encode(images).latent_dist.mode()).sample


def test_an_autoencoder_whose_parts_are_called_in_one_forward_fits_its_budget() -> None:
    torch.manual_seed(0)
    plain, images = Reconstruction(), torch.randn(2, 3, 64, 64)
    ours = copy.deepcopy(plain)

    def step(model: nn.Module) -> tuple[list[Tensor | None], int]:
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            (model(images) - images).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()], live.peak_bytes

    expected, plain_peak = [step(plain) for _ in range(2)][-1]
    actckpt.apply(ours, activation_budget="60%")
    for _ in range(3):
        found, peak = step(ours)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    plan = actckpt.report(ours).plan
    assert plan is not None and peak <= plan.budget_bytes < plain_peak
