"""Shared pieces of the engine's tests: byte arrays, and a wait that has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpu_rig import Rig


@pytest.fixture
def make_bytes() -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(0)

    def make(nbytes: int) -> np.ndarray:
        return rng.integers(0, 256, nbytes, dtype=np.uint8)

    return make


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in 60 s"
            time.sleep(0.001)

    return wait


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def rig(folder: str) -> Rig:
    return Rig(folder)
