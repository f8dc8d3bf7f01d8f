"""A simulated accelerator, `torch.device("sim")`: torch's PrivateUse1 over host memory, with streams that run late.

Two devices, `sim:0` and `sim:1`. Tensors lie in host memory; operators run the kernels of the CPU there, at launch.
Copies to and from pinned memory run as late as the program's events allow, or as a seeded adversary likes. Every access
is judged by happens-before (machine/checker.h), and `take_faults` says what was wrong; what is freed is poisoned. The
library that holds all that is also a driver with the names of CUDA's: `library_path` is what the engine opens.

Importing it makes `torch.sim`, which has the names of `torch.cuda`, and makes `sim` the accelerator of
`torch.accelerator`. Nothing changes for the CPU. The machine lives as long as the process.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sim import building

_HERE = Path(__file__).parent


def _library() -> Path:
    engine = building.ROOT / "csrc" / "engine" / "cuda" / "driver.h"
    files = building.files_of(_HERE)
    autocast = _HERE / "backend" / "autocast.cpp"
    backend = [path for path in building.sources_of(_HERE / "backend") if path != autocast]
    included = [building.ROOT / "csrc", building.ROOT / "tests"]
    own = [f"-I{path}" for path in included]
    folder = Path(torch.__file__).parent
    torchs = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    options = ["-std=c++20", "-O1", "-g0", "-w", "-DTORCH_EXTENSION_NAME=_device", *own]
    options += [f"-isystem{path}" for path in torchs] + [f"-isystem{sysconfig.get_paths()['include']}"]
    options.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    units = [
        building.Unit(backend, options),
        building.Unit([autocast], [*options, "-O0"]),
        building.Unit(building.sources_of(_HERE / "machine"), ["-std=c++17", "-O2", *own]),
    ]
    links = [f"-L{folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    depends = [*files, engine, building.ROOT / "tests" / "sim" / "clock.h"]
    return building.compiled("_device", units, links, depends, torch.__version__)


#: What the engine opens as a CUDA driver.
library_path = str(_library())


def _register() -> Any:
    if hasattr(torch, "sim"):  # under another name of this module
        return torch.sim._extension
    torch.utils.rename_privateuse1_backend("sim")
    extension = building.loaded("_device", Path(library_path))
    from sim.device import torch_module

    torch._register_device_module("sim", torch_module.made(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return extension


_device = _register()
_PRIVATE_USE_1 = torch.sim.default_stream().device_type


def handle_of(stream: torch.Stream) -> int:
    """Return the native handle of a stream; `torch.Stream.native_handle` from torch 2.11 on."""
    return int(_device.stream_handle(stream.device_index, stream.stream_id))


#: Returns the native handle of the stream that is current on a device, by its index; 0 for the default one.
current_handle: Callable[[int], int] = _device.current_handle


def stream_at(handle: int, index: int) -> torch.Stream:
    """Return the stream of a native handle, one of torch's or of the driver's."""
    return torch.Stream(stream_id=_device.stream_id(index, handle), device_index=index, device_type=_PRIVATE_USE_1)


def take_faults() -> list[str]:
    """Return what programs did wrong since the last call, in words."""
    return list(_device.take_faults())


def settle() -> None:
    """Run all that is queued anywhere, and forget who accessed what; faults that were found stay."""
    _device.settle()


def set_adversary(seed: int = 0, eagerness: float = 0.0, reluctance: float = 0.0, *, for_caller: bool = False) -> None:
    """Choose when queued work runs that nothing forces.

    Args:
        seed: all choices follow from it.
        eagerness: how probably a step is taken at each call of the program; 0: everything as late as it can be.
        reluctance: how probably a query takes no step.
        for_caller: queries of other threads take none, so that what is queued does not depend on when they ran.
    """
    _device.set_adversary(seed, eagerness, reluctance, for_caller)


def num_pending(device: int = 0) -> int:
    """Return how many copies, fills and waits are queued on the streams of a device."""
    return int(_device.num_pending(device))


@contextmanager
def capacity(device: int, nbytes: int) -> Iterator[None]:
    """Give a device `nbytes` of memory."""
    before = _device.capacity(device)
    _device.set_capacity(device, nbytes)
    try:
        yield
    finally:
        _device.set_capacity(device, before)


def num_allocations() -> int:
    """Return how many allocations were asked of the devices so far."""
    return int(_device.num_allocations())


@contextmanager
def failing_allocation(number: int) -> Iterator[None]:
    """Let one allocation of device memory in the body fail: 1 is the first one."""
    _device.fail_allocation(number)
    try:
        yield
    finally:
        _device.fail_allocation(0)


@contextmanager
def judging_frees() -> Iterator[None]:
    """Judge the reuse of memory when it is freed, whether or not anybody gets it (machine/memory.h)."""
    _device.set_judges_frees(True)
    try:
        yield
    finally:
        _device.set_judges_frees(False)


@contextmanager
def failing_driver(calls: int, code: int = 700) -> Iterator[None]:
    """Let the driver's call after the next `calls`, and all later ones, return `code`."""
    _device.fail_driver_from(calls + 1, code)
    try:
        yield
    finally:
        _device.fail_driver_from(None, 0)


@contextmanager
def refusing_pins() -> Iterator[None]:
    """Let the driver pin no more host memory."""
    _device.refuse_pins(True)
    try:
        yield
    finally:
        _device.refuse_pins(False)


def is_capturing(stream: torch.Stream) -> bool:
    """Return whether a stream says so, as `torch.Stream.is_capturing`, which torch 2.11 does not have."""
    return bool(_device.is_capturing(stream.device_index, stream.stream_id))


@contextmanager
def capturing(stream: torch.Stream) -> Iterator[None]:
    """Let a stream say that it is being captured into a graph."""
    _device.set_capturing(stream.device_index, stream.stream_id, True)
    try:
        yield
    finally:
        _device.set_capturing(stream.device_index, stream.stream_id, False)


def num_registered_bytes() -> int:
    """Return how much host memory is pinned through the driver."""
    return int(_device.num_registered_bytes())


def num_driver_calls() -> int:
    """Return how many calls of the driver were made so far that can fail."""
    return int(_device.num_driver_calls())


@contextmanager
def timed(*, link_bytes_per_s: float | tuple[float, float] = 0.0, kernel_bytes_per_s: float = 0.0) -> Iterator[None]:
    """Let work take simulated time; it runs when it does all the same. See `clock`, and events with timing.

    Args:
        link_bytes_per_s: of copies to and from pinned memory, those of one device and direction one after the other;
            0: no time. Of both directions, or two: to the host and back.
        kernel_bytes_per_s: of all that a kernel reads and writes; 0: no time.
    """
    out, back = link_bytes_per_s if isinstance(link_bytes_per_s, tuple) else (link_bytes_per_s,) * 2
    _device.set_rates(out, back, kernel_bytes_per_s)
    try:
        yield
    finally:
        _device.set_rates(0.0, 0.0, 0.0)


@contextmanager
def integrated() -> Iterator[None]:
    """Let the devices say that they use the host's memory."""
    torch.sim._is_integrated = True
    try:
        yield
    finally:
        torch.sim._is_integrated = False


def clock() -> float:
    """Return the simulated time of the host in seconds: of what it knows to have ended."""
    return float(_device.host_time_s())


def advance(seconds: float, stream: torch.Stream | None = None) -> None:
    """Let a stream, else the current one, take simulated time before what it is given next."""
    found = torch.accelerator.current_stream() if stream is None else stream
    _device.advance(found.device_index, found.stream_id, seconds)


@contextmanager
def checked() -> Iterator[None]:
    """Start at rest, without adversary and link, and raise at the end what programs did wrong meanwhile."""
    settle()
    set_adversary()
    take_faults()
    try:
        yield
        settle()
        found = take_faults()
        assert not found, "\n".join(found)
    finally:
        settle()
        take_faults()
        set_adversary()
