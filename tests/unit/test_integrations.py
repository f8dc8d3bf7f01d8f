"""`actckpt.integrations` without the libraries: tests/integrations has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import actckpt
import actckpt.integrations
from actckpt.integrations import transformers

_MODULES = sorted(Path(actckpt.integrations.__file__).parent.glob("*.py"))
_LIBRARIES = ("accelerate", "diffusers", "lightning", "peft", "pytorch_lightning", "timm", "transformers", "trl")


def test_importing_actckpt_imports_no_integration_and_importing_all_of_them_no_library() -> None:
    names = [f"actckpt.integrations.{path.stem}" for path in _MODULES if path.stem != "__init__"]
    program = f"""
import importlib, sys, actckpt
assert not [name for name in sys.modules if name.startswith("actckpt.integrations")]
for name in {names}:
    importlib.import_module(name)
assert not set({_LIBRARIES}) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 120


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))


def test_a_model_of_no_library_gets_the_switches_of_transformers() -> None:
    model = _model()
    assert transformers.enable(model, "matmuls") == ("0", "1", "2")
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    with pytest.raises(actckpt.BlocksError, match="none of"):
        actckpt.report(model)
    model.activation_checkpointing_enable()  # type: ignore[operator]
    assert actckpt.report(model).blocks_patched == ("0", "1", "2")
    transformers.disable(model)
    assert not hasattr(model, "gradient_checkpointing_enable")


def test_disable_leaves_what_apply_did() -> None:
    model = _model()
    actckpt.apply(model)
    transformers.disable(model)
    assert actckpt.report(model).blocks_patched == ("0", "1", "2")
    with pytest.raises(actckpt.BlocksError, match="checkpointed already"):
        transformers.enable(model)
    assert not hasattr(model, "gradient_checkpointing_enable")


@pytest.mark.parametrize("function", [transformers.enable, transformers.disable])
def test_what_is_no_model_is_refused_by_name(function: object) -> None:
    with pytest.raises(TypeError, match="able: model is a str, not a module"):
        function("gpt2")  # type: ignore[operator]
