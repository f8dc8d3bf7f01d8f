"""Benchmarks of models of libraries: what they show holds."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import actckpt

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_actckpt_holds_and_peaks_no_higher_than_the_librarys_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["libraries", "--toy", "--out", str(tmp_path / "found.json")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(_BENCHMARKS / "libraries.py"))["main"]()
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert len(figures) == 5
    for methods in figures.values():
        for key in ("held_bytes", "peak_bytes"):
            assert (
                methods["recompute"][key] <= methods["its own"][key] < methods["matmuls"][key] < methods["plain"][key]
            )


@pytest.mark.filterwarnings("ignore:apply. the blocks ran none of the operators")  # Funnel has a gelu of its own
@pytest.mark.parametrize("name", ["SAM", "Mamba-2", "Funnel"])
def test_apply_peaks_no_higher_than_plain_training_under_autocast(name: str) -> None:
    actckpt.configure(audit="off")  # checksums count
    compare = runpy.run_path(str(_BENCHMARKS / "autocast_peaks.py"))["compare"]
    for ways in compare(name).values():
        assert ways["apply"] <= 1.03
        assert ways["region"] <= 1.2
