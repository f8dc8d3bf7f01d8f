"""A stand-in for torchvision, whose builds go with other builds of torch: timm imports it for its data sets."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


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
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_part = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_part else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> Any:
    """Import timm, and leave no torchvision behind."""
    stub = _TorchvisionStub()
    sys.meta_path.insert(0, stub)
    try:
        import timm
    finally:
        sys.meta_path.remove(stub)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # other packages look whether it is there
    return timm
