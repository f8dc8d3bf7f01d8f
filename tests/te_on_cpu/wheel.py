"""Unpacks a wheel of TransformerEngine and loads it on the CPU."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from te_on_cpu import device, extension, rewriting

__all__ = ["load"]

#: Read by TransformerEngine when it is imported. The fusion is one that its te.checkpoint switches off for good.
_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
    "NVTE_BIAS_GELU_NVFUSION": "0",
}
#: Kernels in Triton, which CPU builds of torch lack; export, for which more packages are needed; the other framework.
_STAND_INS = ("transformer_engine.pytorch.triton.", "transformer_engine.pytorch.onnx_extensions")
_ABSENT = ("transformer_engine.jax",)


def load(wheel: Path) -> Any:
    """Return `transformer_engine.pytorch` of a wheel.

    Once per process: TransformerEngine cannot be loaded twice.
    """
    os.environ.update(_ENVIRONMENT)
    root = _unpacked(wheel.resolve())
    sys.path.append(str(root))  # for the metadata of the distribution
    sys.meta_path.insert(0, _Finder(root))
    sys.modules["transformer_engine_torch"] = extension.build()
    return importlib.import_module("transformer_engine.pytorch")


def _unpacked(wheel: Path) -> Path:
    """Return the folder of the unpacked wheel, made anew when what is changed in it changes (Python caches it)."""
    rules = hashlib.sha256(Path(rewriting.__file__).read_bytes()).hexdigest()[:8]
    root = wheel.parent / f"{wheel.stem}-{rules}"
    if not root.exists():
        unfinished = root.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unfinished)
        unfinished.rename(root)
    return root


class _Loader(SourceFileLoader):
    """Loads a source file with the changes of `rewriting`."""

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> types.CodeType:  # type: ignore[override]
        return compile(rewriting.rewritten(data, path), path, "exec", dont_inherit=True, optimize=_optimization)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["_device"] = device
        super().exec_module(module)
        if module.__name__ == "transformer_engine.common":
            module.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]


class _StandIn:
    """Loads a module whose functions raise when they are called."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: extension.not_emulated(f"{module.__name__}.{name}")  # type: ignore[method-assign]


class _Finder:
    """Finds the modules of TransformerEngine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "transformer_engine":
            return None
        if name.startswith(_ABSENT):
            raise ModuleNotFoundError(name, name=name)
        if name.startswith(_STAND_INS):
            return importlib.util.spec_from_loader(name, _StandIn())  # type: ignore[arg-type]
        for folder in path or [str(self._root)]:
            spec = FileFinder(folder, (_Loader, [".py"])).find_spec(name)
            if spec is not None:
                return spec
        return None
