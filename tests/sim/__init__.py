"""Simulated machines, a mock of the CUDA driver and a file system that misbehaves, in C++; tests only.

The extension is compiled when the tests first import it, from this folder and `csrc/engine`, into `build/sim`, under a
name that changes with any of the sources. It needs a C++17 compiler and pybind11, which the extra `test` installs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actckpt._C import DeviceEngine, SpillFile
from actckpt._core.devices import Accelerator
from actckpt._offload.cpu import CpuStore

_ROOT = Path(__file__).parents[2]


def _compile(sources: list[Path], target: Path) -> None:
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise ImportError(
            "tests/sim is compiled with pybind11, which is not installed: pip install pybind11"
        ) from error
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    includes = [_ROOT / "csrc", _ROOT / "tests", pybind11.get_include(), sysconfig.get_paths()["include"]]
    options = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", *(f"-I{path}" for path in includes)]
    text = "".join(f'#include "{source}"\n' for source in sources)
    print(f"tests/sim: compiling {target.name}, about half a minute", file=sys.__stderr__, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # renamed at the end: others may be at it too
        made = Path(folder) / target.name
        command = [*compiler, *options, "-shared", "-x", "c++", "-", "-o", str(made), "-ldl"]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True)
        except OSError as error:
            raise ImportError(
                f"tests/sim needs a C++17 compiler, and '{compiler[0]}' is not found: apt install g++ | "
                "dnf install gcc-c++ | conda install -c conda-forge gxx, or name another in CXX"
            ) from error
        if done.returncode != 0:
            raise ImportError(f"tests/sim does not compile: {shlex.join(command)}\n{done.stderr}")
        made.replace(target)


def _load() -> Any:
    folders = [_ROOT / "csrc" / "engine", _ROOT / "tests" / "sim", _ROOT / "csrc" / "bind"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
    content = b"".join(str(path.relative_to(_ROOT)).encode() + path.read_bytes() for path in files)
    digest = hashlib.sha256(content + sys.version.encode()).hexdigest()[:16]
    target = _ROOT / "build" / "sim" / digest / f"_sim{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile([path for path in files if path.suffix == ".cpp" and path.parent.name != "bind"], target)
    spec = importlib.util.spec_from_file_location("_sim", target)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_sim = _load()
Faults = _sim.Faults
FaultyFileIo = _sim.FaultyFileIo
missing_in_driver: Callable[[str], str] = _sim.missing_in_driver
rules: Callable[[], list[str]] = _sim.rules
run_on_sim: Callable[..., Any] = _sim.run_on_sim
run_on_mock_cuda: Callable[..., Any] = _sim.run_on_mock_cuda


class MockCuda(_sim.MockCuda):  # type: ignore[misc]
    """One device of a mock driver with two streams; nothing runs before `drain`."""

    def engine(self, **options: Any) -> DeviceEngine:
        """Return an engine of the package over this device: workers' jobs run where somebody waits, and in `_work`."""
        return DeviceEngine.cuda(num_workers=0, driver=self.driver, **options)


class OneStream(Accelerator):
    """An accelerator that torch has no devices of; its one stream is the first of the mock driver."""

    driver_library = "the mock"

    def stream_handle(self, device: torch.device) -> int:
        return 0


def spill_file(folder: str, io: Any, **options: Any) -> SpillFile:
    """Return a spill file of the package whose reads and writes go through `io`, a `FaultyFileIo`."""
    return SpillFile(folder, io=io.capsule, **options)


def disk_store(folder: str, io: Any, *, limit_bytes: int = (1 << 64) - 1, **options: Any) -> CpuStore:
    """Return a store of the package over such a file."""
    return CpuStore.on_file(spill_file(folder, io, limit_bytes=limit_bytes), **options)
