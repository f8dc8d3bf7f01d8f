"""Resident memory and time of a training step with and without `offload(to="disk")`.

Layers of Linear and GELU on the CPU with activations of 4 GiB, or ACTCKPT_BENCH_GIB; the wider the layers, the more
compute there is to hide the disk behind. Each method runs in a process of its own; a thread samples /proc/self/statm.
Bandwidths are measured in the same run, with the same threads, in the same folder. Run with
`python -m pytest benchmarks/test_offload_disk.py`. Needs Linux, that much space in TMPDIR, and twice that much memory.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

_GIB = float(os.environ.get("ACTCKPT_BENCH_GIB", "4"))
_WIDTHS = (1024, 256)
_BLOCKS = 16
_STEPS = 3
_CHUNK = 8 << 20
_WORKERS = 2


class _PeakRss:
    """Samples the resident bytes of this process every 5 ms."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_PeakRss":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", "rb", buffering=0) as file:
            while True:
                file.seek(0)
                self.peak = max(self.peak, int(file.read().split()[1]) * page)
                if self._stop.wait(0.005):
                    return


def _step_in_this_process(method: str, gib: float, width: int) -> dict[str, Any]:
    import torch

    import actckpt

    torch.manual_seed(0)
    rows = max(int(gib * 2**30) // (_BLOCKS * 2 * width * 4), 1)  # a block saves the inputs of Linear and of GELU
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(_BLOCKS)]
    model = torch.nn.Sequential(*layers)
    actckpt.configure(num_workers=_WORKERS)

    def step() -> None:
        x = torch.randn(rows, width)
        if method == "plain":
            y = model(x).mean()
        else:
            with actckpt.offload("disk"):
                y = model(x).mean()
        y.backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    actckpt.reset_stats()
    seconds, peaks = [], []
    for _ in range(_STEPS):
        with _PeakRss() as rss:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        peaks.append(rss.peak)
    figures = actckpt.stats()
    checksum = sum(float(p.grad.double().abs().sum()) for p in model.parameters())
    return {
        "peak_rss_bytes": max(peaks),
        "step_seconds": min(seconds[1:]),
        "all_step_seconds": seconds,
        "activation_bytes": rows * width * 4 * _BLOCKS * 2,
        "offloaded_bytes_per_step": figures.offloaded_bytes // _STEPS,
        "stall_seconds_per_step": figures.stall_seconds / _STEPS,
        "late_reloads": figures.late_reloads,
        "prefetched_reloads": figures.prefetched_reloads,
        "failed_writes": figures.failed_writes,
        "gradient_checksum": checksum,
    }


def _in_child(method: str, width: int) -> dict[str, Any]:
    command = [sys.executable, __file__, method, str(_GIB), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _in_threads(work: Callable[[int], None]) -> float:
    threads = [threading.Thread(target=work, args=(n,)) for n in range(_WORKERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def _measured_bandwidths(total_bytes: int) -> dict[str, float]:
    """Bytes per second of direct writes and reads, and of copies in memory, with as many threads as the engine."""
    num_chunks = max(total_bytes // _CHUNK // _WORKERS, 1)
    span = num_chunks * _CHUNK
    buffers = [mmap.mmap(-1, _CHUNK) for _ in range(_WORKERS)]  # aligned to pages
    others = [mmap.mmap(-1, _CHUNK) for _ in range(_WORKERS)]
    for buffer in buffers:
        buffer.write(os.urandom(1 << 20) * (_CHUNK >> 20))
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    try:
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        descriptor = os.dup(file.fileno())

    def write(n: int) -> None:
        for i in range(num_chunks):
            os.pwrite(descriptor, buffers[n], n * span + i * _CHUNK)

    def read(n: int) -> None:
        for i in range(num_chunks):
            os.preadv(descriptor, [buffers[n]], n * span + i * _CHUNK)

    def copy(n: int) -> None:
        import ctypes

        target = ctypes.addressof(ctypes.c_char.from_buffer(others[n]))
        source = ctypes.addressof(ctypes.c_char.from_buffer(buffers[n]))
        for _ in range(num_chunks):
            ctypes.memmove(target, source, _CHUNK)  # releases the GIL

    try:
        names = {"write": write, "read": read, "copy": copy}
        return {name: span * _WORKERS / _in_threads(work) for name, work in names.items()}
    finally:
        os.close(descriptor)
        file.close()


@pytest.mark.parametrize("width", _WIDTHS)
def test_fall_of_resident_memory_and_time_of_a_step(
    benchmark: Any, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    plain = _in_child("plain", width)
    bandwidths = _measured_bandwidths(int(_GIB * 2**30) // 4)
    offload = _in_child("disk", width)
    assert offload["gradient_checksum"] == plain["gradient_checksum"]
    num_bytes = offload["offloaded_bytes_per_step"]
    fall = (plain["peak_rss_bytes"] - offload["peak_rss_bytes"]) / plain["activation_bytes"]
    io_seconds = num_bytes / bandwidths["write"] + num_bytes / bandwidths["read"]
    bound = max(plain["step_seconds"] + 2 * num_bytes / bandwidths["copy"], io_seconds)
    ratio = offload["step_seconds"] / bound
    benchmark.extra_info.update(
        plain=plain,
        offload=offload,
        bandwidths=bandwidths,
        fall_over_activations=fall,
        bound_seconds=bound,
        ratio=ratio,
    )
    benchmark.pedantic(lambda: None, rounds=1)
    with capsys.disabled():
        activations = plain["activation_bytes"]
        print(f"\nwidth {width}, activations {activations / 2**30:.2f} GiB, moved {num_bytes / 2**30:.2f} GiB")
        for name, figures in (("plain", plain), ("offload", offload)):
            print(f"{name}: peak {figures['peak_rss_bytes'] / 2**30:.2f} GiB, step {figures['step_seconds']:.2f} s")
        print(", ".join(f"{name} {value / 1e9:.2f} GB/s" for name, value in bandwidths.items()))
        print(f"fall of peak over activations {fall:.2f} (at least 0.70), step over bound {ratio:.2f} (at most 1.15)")
    assert fall >= 0.70
    assert ratio <= 1.15


if __name__ == "__main__":
    print(json.dumps(_step_in_this_process(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))))
