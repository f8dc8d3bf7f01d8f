"""Every test here needs a CUDA device; without one each is skipped, visibly.

One command runs them all, unattended: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it


#: Warnings are errors; these of torch are about the device, or about how we look at it.
_EXPECTED_WARNINGS = (
    "ignore:.*deterministic",  # operators that have no such form: those results are compared with themselves first
    "ignore:.*Synchronization debug mode is a prototype",
    "ignore:.*AccumulateGrad node's stream does not match",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        for expected in _EXPECTED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(expected))


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results can be compared bit by bit; `empty` stays empty, as in training."""
    torch.cuda.manual_seed_all(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
