"""`apply` finds the blocks of timm's models, and holds no more than timm's own checkpointing."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from held import assert_holds_no_more_than_its_own
from torchvision_stub import import_timm
from training import assert_equal, train_on

import actckpt

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")


@pytest.fixture(scope="module")
def timm() -> Any:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return import_timm()


MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "swin_tiny_patch4_window7_224": ({"img_size": 112, "embed_dim": 48}, 112, 12),
    "maxvit_nano_rw_256": ({"img_size": 128}, 128, 7),
    "convnext_atto": ({}, 96, 12),
    "efficientnet_b0": ({}, 96, 16),
    "regnety_002": ({}, 96, 13),
    "vit_tiny_patch16_224": ({"img_size": 112}, 112, 12),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model_hold_and_peak_no_more_than_timms_own(timm: Any, name: str) -> None:
    options, size, num_blocks = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    inputs = (torch.randn(2, 3, size, size),)
    assert_holds_no_more_than_its_own(
        model, inputs, lambda model: model.set_grad_checkpointing(True), num_blocks=num_blocks, of_plain=0.7
    )


def test_timms_own_checkpointing_is_taken_over_and_given_back(timm: Any) -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, num_classes=10)
    for is_on_before in (True, False):
        model.set_grad_checkpointing(is_on_before)
        actckpt.apply(model, "matmuls")
        model.set_grad_checkpointing()
        model(torch.randn(1, 3, 32, 32)).sum().backward()
        assert not model.grad_checkpointing and actckpt.report(model).blocks_ran
        actckpt.remove(model)
        assert model.grad_checkpointing


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_twenty_steps_of_a_vit_are_those_of_plain_training(timm: Any, policy: str) -> None:
    torch.manual_seed(0)
    options = {"img_size": 32, "embed_dim": 48, "depth": 4, "drop_path_rate": 0.2, "proj_drop_rate": 0.1}
    plain = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **options)
    ours, images = copy.deepcopy(plain), torch.randn(2, 3, 32, 32)
    actckpt.apply(ours, policy)
    found, expected = (train_on(model, lambda model=model: model(images).square().mean()) for model in (ours, plain))
    assert_equal(found, expected)
