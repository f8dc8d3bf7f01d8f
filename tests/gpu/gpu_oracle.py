"""What the GPU tests share: engines that use one tier only, and a way to make bytes really leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_programs import repeated
from offload_oracle import assert_same

from actckpt import _C, config
from actckpt._core.devices import CUDA_LIBRARY, Cuda
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore

TIERS = ("pinned", "disk")
Program = Callable[[Callable[[], Any]], Any]


@contextmanager
def only(tier: str, folder: Path, *, bounce_bytes: int = 32 << 20, **options: Any) -> Iterator[_C.DeviceEngine]:
    """Offload GPU tensors to one tier inside the block. `faults`: a disk that misbehaves on demand."""
    file = _C.SpillFile(str(folder), io=options.pop("io", None)) if tier == "disk" else None
    engine = _C.DeviceEngine.cuda(
        library=CUDA_LIBRARY,
        limit_bytes=4 << 30 if tier == "pinned" else 0,
        window_bytes=options.pop("window_bytes", 64 << 20),
        release=_C.TorchStreams(Cuda()),
        spill_file=file,
        bounce_bytes=bounce_bytes,
    )
    assert not options, options
    before = dict(stores._stores)
    stores._stores["cuda"] = config.generation, DeviceStore(engine, Cuda())
    try:
        yield engine
        figures = engine.stats()
        assert figures.last_error == "", figures.last_error
    finally:
        torch.cuda.synchronize()
        stores._stores.clear()
        stores._stores.update(before)


def run_in_process(*words: str, timeout_s: float = 120, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a process of its own, which finds the modules of tests."""
    here = Path(__file__).parent
    tests = here.parent
    paths = [tests.parent, tests / "contract", tests / "distributed", here]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **settings}
    try:
        ran = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=tests.parent,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"hangs after {(error.stdout or b'')!r}\n{(error.stderr or b'')[-4000:]!r}") from None
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-6000:]}"
    return ran


def settle() -> None:
    """Wait until every copy out has ended and let go of the sources: backward must bring the bytes back."""
    torch.cuda.synchronize()
    backend = stores.device_store()
    if isinstance(backend, DeviceStore):
        backend.engine.poll()


def assert_same_here(program: Program) -> None:
    """As `assert_same`; skips what is not even the same without offloading, twice in a row."""

    def run() -> Any:
        torch.manual_seed(7)
        return program(nullcontext)

    repeated(run)
    assert_same(program)
