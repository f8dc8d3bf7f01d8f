"""`apply` finds the blocks of timm's models, and holds no more than timm's own checkpointing."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from held import assert_holds_no_more_than_its_own

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")


class _Anything:
    """A class that stands for all classes and functions of a package that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _Stub(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package
    InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _TorchvisionStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """timm imports torchvision for its data sets, which no model needs; its builds go with other builds of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_part = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_part else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture(scope="module")
def timm() -> Any:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    stub = _TorchvisionStub()
    sys.meta_path.insert(0, stub)
    try:
        import timm
    finally:
        sys.meta_path.remove(stub)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # other packages look whether it is there
    return timm


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
