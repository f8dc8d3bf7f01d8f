"""Imports point one way (see docs/how-it-works.md), and importing actckpt is cheap."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "actckpt"
_SOURCES = _ROOT / "csrc"

#: Lower rooms first: a module may import from rooms of the lines before its own, and from its own room.
_ROOMS = [
    ["_version", "_error_base", "action", "_text", "_show"],
    ["errors", "config", "_C"],
    ["_core", "planner"],
    ["_rerun", "_offload"],
    ["_replay"],
    ["_bind", "policies"],
    ["_compile", "rng"],
    ["regions", "api"],
    ["_blocks"],
    ["blocks", "statistics"],
    ["te"],
    ["memory", "doctor"],
    ["comparison"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
_RANKS = {room: rank for rank, rooms in enumerate(_ROOMS) for room in rooms}

#: The same of the C++ sources. The engine knows no other room, and only what binds it knows the engine.
_CPP_ROOMS = [["core", "engine"], ["rerun", "offload"], ["replay"], ["bind"]]
_CPP_RANKS = {room: rank for rank, rooms in enumerate(_CPP_ROOMS) for room in rooms}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "actckpt"}


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = path.relative_to(_PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    for name in _imported(path):
        imported = _room(name)
        if imported in _RANKS:
            assert imported == room or _RANKS[imported] < _RANKS[room], f"{path.name} imports {name}"
        else:  # `from actckpt import name`: what the package exports, for rooms above the API
            assert _RANKS[room] > _RANKS["blocks"], f"{path.name} imports the public name {name}"


@pytest.mark.parametrize("path", sorted(_SOURCES.rglob("*.*")), ids=lambda path: str(path.relative_to(_SOURCES)))
def test_includes_point_downward(path: Path) -> None:
    room = path.relative_to(_SOURCES).parts[0]
    for name in re.findall(r'#include "(\w+)/', path.read_text()):
        assert name == room or _CPP_RANKS[name] < _CPP_RANKS[room], f"{path.name} includes from {name}"
        assert name != "engine" or room in ("engine", "bind"), f"{path.name} includes from the engine"


def test_every_module_has_a_room() -> None:
    rooms = {path.relative_to(_PACKAGE).parts[0].removesuffix(".py") for path in _PACKAGE.rglob("*.py")}
    assert rooms - {"__init__"} <= set(_RANKS)


def test_import_adds_less_than_300_ms_to_torch() -> None:
    code = "import torch, time; start = time.process_time(); import actckpt; print(time.process_time() - start)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 0.3
