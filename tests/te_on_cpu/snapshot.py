"""Everything that TransformerEngine holds, by path: modules' attributes, its globals and class attributes, by value.

Whatever a rerun updates a second time shows here, named or not.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["snapshot"]

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
#: Of torch.nn.Module itself; its hooks have numbers that grow.
_SKIPPED = frozenset(vars(torch.nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
_PACKAGE = "transformer_engine"


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """Return what `model` and TransformerEngine hold."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    roots: list[tuple[str, Any]] = [("model", model)]
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == _PACKAGE and isinstance(module, types.ModuleType):
            roots += _globals(name, module)
    for path, value in roots:
        _note(value, path, found, seen)
    return found


def _globals(name: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(vars(module).items()):
        if key.startswith("__") or key == "_device":
            continue
        if not isinstance(value, type):
            yield f"{name}:{key}", value
        elif value.__module__ == name:
            for attribute, held in sorted(vars(value).items()):
                if not attribute.startswith("__"):
                    yield f"{name}.{key}.{attribute}", held


def _note(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        found[path] = repr(value)
        return
    if isinstance(value, torch.Generator):
        found[path] = value.get_state().tolist()
        return
    if id(value) in seen or isinstance(value, (type, types.ModuleType)):
        return
    seen.add(id(value))
    if type(value) in (Tensor, torch.nn.Parameter):
        flat = value.detach().reshape(-1).contiguous()
        found[path] = str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
        return
    for part, held in _parts(value):
        _note(held, f"{path}{part}", found, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds."""
    if isinstance(value, (list, tuple, deque)):
        yield "#length", len(value)
        for index, held in enumerate(value):
            yield f"[{index}]", held
    elif isinstance(value, (set, frozenset)):
        yield "#length", len(value)
    elif isinstance(value, dict):
        for key, held in value.items():
            yield f"[{key}]", held
    elif isinstance(value, (Tensor, torch.nn.Module)) or type(value).__module__.split(".")[0] == _PACKAGE:
        for key, held in sorted(_attributes(value).items()):
            if key not in _SKIPPED:
                yield f".{key}", held


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
