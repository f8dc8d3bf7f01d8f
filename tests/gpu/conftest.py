"""Every test here needs a CUDA device; without one each is skipped, visibly.

One command runs them all, unattended: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import on_cuda
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        for expected in on_cuda.EXPECTED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(expected))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.cuda.manual_seed_all(0)
    with on_cuda.deterministic():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Tell fixtures, once a test has ended, whether it passed: one that was skipped did not."""
    report = yield
    if call.when == "call":
        item.has_passed = report.passed  # type: ignore[attr-defined]
    return report
