"""Rows of measurements: JSON lines, each written the moment it is measured."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt
from actckpt._core import devices
from actckpt._core.devices import Accelerator

__all__ = ["Machine", "Row", "Rows", "medians"]

Row = dict[str, Any]


class _Idle(TorchDispatchMode):
    """Runs each operator and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _us_per_call(call: Callable[[], object], number: int) -> float:
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(number):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / number)
    return statistics.median(samples)


class _Energy:
    """The energy counter of NVML, if it has one for this device."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.get_device_module(device).get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
            self.joules()
        except (ImportError, AttributeError, OSError, RuntimeError, *_nvml_errors()):
            self._handle = None

    def joules(self) -> float | None:
        """Return the joules that the device has used since its driver was loaded."""
        return None if self._handle is None else float(self._read(self._handle)) / 1000


def _nvml_errors() -> tuple[type[Exception], ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    return (pynvml.NVMLError,)


@dataclass(frozen=True)
class Machine:
    """The device that is measured, or a simulated one."""

    accelerator: Accelerator
    #: Everything runs at toy size on the simulated accelerator of the tests.
    is_rehearsal: bool
    #: Limits what the process may allocate: bytes, inside of the block.
    capped: Callable[[int], contextlib.AbstractContextManager[Any]]

    @property
    def device(self) -> torch.device:
        """The first device."""
        return self.accelerator.device_at(0)

    def versions(self) -> dict[str, str]:
        """Return the names of device and driver, and the versions of packages."""
        return {
            "gpu": self.accelerator.name_of(self.device),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "actckpt": actckpt.__version__,
        }

    def calibration(self) -> dict[str, float]:
        """Return how fast the host is: microseconds of an idle dispatch mode and of launching a kernel."""
        number = 20 if self.is_rehearsal else 2000
        small, on_device = torch.zeros(4), torch.zeros(4, device=self.device)
        plain = _us_per_call(lambda: small.add_(1), number)
        with _Idle():
            idle = _us_per_call(lambda: small.add_(1), number)
        launch = _us_per_call(lambda: on_device.add_(1), number)
        devices.synchronize(self.device)
        return {"idle_dispatch_mode_us": idle - plain, "launch_us": launch, "load": os.getloadavg()[0]}

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return how long work takes, by the events of the device."""
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        devices.synchronize(self.device)
        start.record()
        work()
        devices.synchronize(self.device)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def free_memory(self) -> None:
        """Collect cycles and empty the caches of both allocators."""
        gc.collect()  # models that `apply` patched are in cycles
        self.accelerator.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


class Rows:
    """The rows of a part.

    Args:
        path: the file, one JSON object per line.
        machine: what is measured.
        deadline: by `time.monotonic`; no row begins after it.
    """

    def __init__(self, path: Path, machine: Machine, deadline: float) -> None:
        self.machine, self.deadline = machine, deadline
        self.failed: list[str] = []
        #: By name, without what every row has.
        self.by_name: dict[str, Row] = {}
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self._common = {"versions": machine.versions(), "host": machine.calibration()}
        self._energy = _Energy(machine.device)

    @property
    def part(self) -> str:
        """The name of the part."""
        return self._path.stem

    def measure(
        self, name: str, measure: Callable[[], Row], *, empties_caches: bool = True, **facts: Any
    ) -> Row | None:
        """Write the row that `measure` returns, or why there is none, which is not the end of the part."""
        start = time.monotonic()
        row: Row | None = None
        if start > self.deadline:
            written: Row = {"skipped": "out of time"}
        else:
            try:
                written = row = measure()
            except ModuleNotFoundError as error:
                written = {"not_installed": error.name or str(error)}
            except Exception as error:
                kind = "out_of_memory" if _is_out_of_memory(error) else "failed"
                written = {kind: f"{type(error).__name__}: {error}"}
            if empties_caches:
                with contextlib.suppress(Exception):  # after an error that the device does not recover from
                    self.machine.free_memory()
        if "failed" in written:
            self.failed.append(name)
        self.by_name[name] = {**facts, **written}
        self._write({"row": name, **facts, **written, "row_seconds": round(time.monotonic() - start, 2)})
        return row if row is not None and "failed" not in row else None

    def _write(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**row, **self._common}) + "\n")
        print(json.dumps(row), flush=True)

    def run(self, step: Callable[[], object], repeats: int = 1) -> Row:
        """Run a step some times; return what one takes, and the peaks of all."""
        machine = self.machine
        devices.synchronize(machine.device)
        torch.accelerator.reset_peak_memory_stats()
        stall_s, joules, host_s = actckpt.stats().stall_seconds, self._energy.joules(), list[float]()

        def issue() -> None:
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            host_s.append(time.perf_counter() - start)

        device_ms = machine.milliseconds(issue)
        end_joules = self._energy.joules()
        return {
            "peak_allocated_bytes": torch.accelerator.max_memory_allocated(),
            "peak_reserved_bytes": torch.accelerator.max_memory_reserved(),
            "host_ms": 1e3 * host_s[0] / repeats,
            "device_ms": device_ms / repeats,
            "joules": None if joules is None or end_joules is None else (end_joules - joules) / repeats,
            "stall_ms": 1e3 * (actckpt.stats().stall_seconds - stall_s) / repeats,
        }


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed from, says that memory ran out."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error.__context__))


def medians(rows: Iterable[Row]) -> Row:
    """Return the medians of rows of one step, and the highest peaks."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {
        name: max(values) if name.startswith("peak_") else None if None in values else statistics.median(values)
        for name, values in columns.items()
    }
