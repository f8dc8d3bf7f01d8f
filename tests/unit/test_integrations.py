"""`actckpt.integrations` without the libraries: tests/integrations has them."""

import subprocess
import sys
from pathlib import Path

import actckpt.integrations

_MODULES = sorted(Path(actckpt.integrations.__file__).parent.glob("*.py"))
_LIBRARIES = ("accelerate", "diffusers", "lightning", "peft", "pytorch_lightning", "timm", "transformer_engine")
_LIBRARIES += ("transformers", "trl")


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
