"""The picture of memory over time."""

from __future__ import annotations

from pathlib import Path

import pytest

from actckpt.report.plot import plot_timelines


def test_picture_is_a_png_with_one_line_per_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    many = {f"method {index}": [(0.0, 0), (0.5, 2**20 * index), (1.0, 0)] for index in range(10)}
    plot_timelines(many, title="ten methods", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_timeline_without_events_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_timelines({"nothing": []}, title="empty", path=tmp_path / "memory.png")
    assert (tmp_path / "memory.png").exists()
