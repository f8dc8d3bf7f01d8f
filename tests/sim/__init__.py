"""Simulated machines, a mock of the CUDA driver and a file system that misbehaves, in C++; tests only.

The extension is compiled when the tests first import it, from this folder and `csrc/engine`, into `build/sim`, under a
name that changes with any of the sources. It needs a C++17 compiler and pybind11, which the extra `test` installs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from typing import Any

from actckpt._C import DeviceEngine, SpillFile
from actckpt._core.devices import Accelerator
from actckpt._offload.cpu import CpuStore
from sim import building


def _load() -> Any:
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise ImportError(
            "tests/sim is compiled with pybind11, which is not installed: pip install pybind11"
        ) from error
    engine, own = building.ROOT / "csrc" / "engine", building.ROOT / "tests" / "sim"
    files = [path for path in building.files_of(own) if path.parent == own]  # the folder of the device is another's
    includes = [building.ROOT / "csrc", own.parent, pybind11.get_include(), sysconfig.get_paths()["include"]]
    unit = building.Unit(
        building.sources_of(engine) + [path for path in files if path.suffix == ".cpp"],
        ["-std=c++17", "-O2", *(f"-I{path}" for path in includes)],
    )
    depends = files + building.files_of(engine, building.ROOT / "csrc" / "bind")
    return building.loaded("_sim", building.compiled("_sim", [unit], ["-ldl"], depends))


_sim = _load()
Faults = _sim.Faults
FaultyFileIo = _sim.FaultyFileIo
driver_without: Callable[[str, str], object] = _sim.driver_without
missing_in_driver: Callable[[str], str] = _sim.missing_in_driver
rules: Callable[[], list[str]] = _sim.rules
run_on_mock_cuda: Callable[..., Any] = _sim.run_on_mock_cuda


class MockCuda(_sim.MockCuda):  # type: ignore[misc]
    """One device of a mock driver with two streams; nothing runs before `drain`."""

    def engine(self, **options: Any) -> DeviceEngine:
        """Return an engine of the package over this device: workers' jobs run where somebody waits, and in `_work`."""
        return DeviceEngine.cuda(num_workers=0, driver=self.driver, **options)


class OneStream(Accelerator):
    """An accelerator that torch has no devices of; its one stream is the first of the mock driver."""

    driver_library = "the mock"

    def stream_handle(self, index: int) -> int:
        return 0


def spill_file(folder: str, io: Any, **options: Any) -> SpillFile:
    """Return a spill file of the package whose reads and writes go through `io`, a `FaultyFileIo`."""
    return SpillFile(folder, io=io.capsule, **options)


def disk_store(folder: str, io: Any, *, limit_bytes: int = (1 << 64) - 1, **options: Any) -> CpuStore:
    """Return a store of the package over such a file."""
    return CpuStore.on_file(spill_file(folder, io, limit_bytes=limit_bytes), **options)
