"""`actckpt doctor`: versions and backends with reasons, limits, and measured bandwidths."""

import mmap
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator

import torch

from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._offload import limits
from actckpt._offload.device import no_backend
from actckpt._version import __version__
from actckpt.te.registration import describe

__all__ = ["examine"]

_MEASURED_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20

Finding = tuple[str, str]


def examine(*, measure: bool = True) -> Iterator[Finding]:
    """Yield (topic, finding) one by one, as they become known.

    Args:
        measure: whether to measure bandwidths, which takes a few seconds and 256 MiB of disk.
    """
    yield "actckpt", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads"
    yield "transformer engine", describe()
    yield from _device(measure)
    yield from _disk(measure)


def _device(measure: bool) -> Iterator[Finding]:
    accelerator = devices.available()
    if accelerator is None:
        reason = _C.why_no_driver(devices.CUDA_LIBRARY)
        yield "offload of GPU tensors", f"off: torch finds no GPU; driver: {reason or 'present'}"
        return
    devices_here = [accelerator.device_at(index) for index in range(accelerator.device_count())]
    yield "gpu", ", ".join(map(accelerator.name_of, devices_here))
    for device in devices_here:
        yield str(device), _describe(accelerator, device)
    if reason := no_backend(accelerator.device_type):
        yield "offload of GPU tensors", f"off: {reason}"
        return
    settings = config.settings()
    if accelerator.is_integrated:
        place = f"to disk only, {settings.spill_dir}" if settings.spill_dir else "off"
        yield "offload of GPU tensors", f"{place}: the GPU uses the host's memory, where a copy frees none"
        return
    host, source = settings.host_limit, "configured"
    if host is None:
        host, source = limits.default_host_limit(), "half of what is available, per local rank"
    library = accelerator.driver_library
    yield "offload of GPU tensors", f"on: pinned host memory, copies on side streams; driver: {library}"
    yield "pinned memory limit", f"{_size(host)} ({source})"
    yield "beyond it", settings.spill_dir or "tensors stay on the GPU: spill_dir is not set"
    if measure:
        out, back = (_rate(_time_copy(devices_here[0], to_host=to_host)) for to_host in (True, False))
        yield "link", f"device to host {out}, host to device {back}"


def _describe(accelerator: Accelerator, device: torch.device) -> str:
    """Return a device's memory, and facts from its vendor's library."""
    facts, known = accelerator.facts_of(device), []
    if (memory := accelerator.memory_info(device)) is not None:
        known.append(f"{_size(memory[0])} free of {_size(memory[1])}")
    if facts is not None and facts.link_generation is not None:
        known.append(f"PCI Express {facts.link_generation} x{facts.link_width}")
    if facts is not None and facts.numa_node is not None:
        known.append(f"NUMA node {facts.numa_node}")
    return ", ".join(known) or "nobody tells its memory"


def _disk(measure: bool) -> Iterator[Finding]:
    folder = config.settings().spill_folder
    try:
        file = _C.SpillFile(folder)
    except _C.OffloadError as error:
        yield "offload of CPU tensors", f"off: {' '.join(str(error).split())}"
        return
    in_memory = _C.is_memory_folder(folder)
    yield "offload of CPU tensors", f"on: unlinked spill file, {'direct' if file.direct else 'buffered'} I/O"
    warning = "; in memory (tmpfs), frees nothing: set spill_dir" if in_memory else ""
    limit = config.settings().disk_limit
    free = shutil.disk_usage(folder).free
    yield "spill folder", f"{folder}, {_size(free)} free, limit {'none' if limit is None else _size(limit)}{warning}"
    if measure and free < 2 * _MEASURED_BYTES:
        yield "disk", f"not measured: less than {_size(2 * _MEASURED_BYTES)} free"
    elif measure:
        write_seconds, read_seconds = _time_disk(file)
        yield "disk", f"write {_rate(write_seconds)}, read {_rate(read_seconds)} (one thread)"


def _time_disk(file: _C.SpillFile) -> tuple[float, float]:
    memory = mmap.mmap(-1, _BLOCK_BYTES)  # aligned to pages, as the file wants it
    memory.write(os.urandom(_BLOCK_BYTES))
    block = torch.frombuffer(memory, dtype=torch.uint8)
    count = _MEASURED_BYTES // _BLOCK_BYTES
    for stored in [file.write(block.data_ptr(), _BLOCK_BYTES) for _ in range(count)]:
        stored.free()  # the second pass overwrites, as training does from its second step on
    written: list[_C.SpillBlock] = []
    write_seconds = _seconds(lambda: written.extend(file.write(block.data_ptr(), _BLOCK_BYTES) for _ in range(count)))
    read_seconds = _seconds(lambda: _read_all(file, written, block.data_ptr()))
    for stored in written:
        stored.free()
    return write_seconds, read_seconds


def _read_all(file: _C.SpillFile, blocks: list[_C.SpillBlock], address: int) -> None:
    for block in blocks:
        file.read(block, address)


def _time_copy(device: torch.device, *, to_host: bool) -> float:
    host = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    source, destination = (there, host) if to_host else (host, there)

    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        devices.synchronize(device)

    copy()
    return min(_seconds(copy) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rate(seconds: float) -> str:
    return f"{_MEASURED_BYTES / seconds / 1e9:.1f} GB/s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
