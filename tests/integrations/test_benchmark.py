"""The benchmark of docs/libraries.md runs at toy size, and what it shows holds there too."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

_BENCHMARK = Path(__file__).parents[2] / "benchmarks/libraries.py"


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_actckpt_holds_and_peaks_no_higher_than_the_librarys_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["libraries", "--toy", "--out", str(tmp_path / "found.json")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(_BENCHMARK))["main"]()
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert len(figures) == 5
    for methods in figures.values():
        for key in ("held_bytes", "peak_bytes"):
            assert (
                methods["recompute"][key] <= methods["its own"][key] < methods["matmuls"][key] < methods["plain"][key]
            )
