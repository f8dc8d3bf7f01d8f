"""TransformerEngine as `actckpt.te` looks for it, where it is not installed."""

from __future__ import annotations

import ast
from pathlib import Path

import actckpt
from actckpt.doctor import examine
from actckpt.te.internals import read_already

_PACKAGE = Path(actckpt.__file__).parent


def test_versions_that_were_read() -> None:
    for version in ("2.9", "2.9.0+cu13", "2.14.1", "2.20.2"):
        assert read_already(version)
    for version in ("2.8", "1.13", "2.20.3", "2.21", "3.0", "unknown"):
        assert not read_already(version)


def test_one_file_knows_the_insides() -> None:
    """Names of TransformerEngine's insides stand in actckpt/te/internals.py alone."""
    insides = (
        "_recompute_buffer",
        "_RECOMPUTE_",
        "_fp8_workspaces",
        "_TE_",
        "quantization_state",
        "fp8_meta",
        "OFFLOAD_",
    )
    for path in _PACKAGE.rglob("*.py"):
        if path == _PACKAGE / "te" / "internals.py":
            continue
        texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        attributes = [n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        for name in insides:
            assert not any(name in text for text in (*texts, *attributes) if isinstance(text, str)), f"{path}: {name}"


def test_doctor_says_how_to_install_it() -> None:
    assert dict(examine(measure=False))["transformer engine"].startswith("not installed: pip install")
