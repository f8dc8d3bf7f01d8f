"""The picture of memory over time."""

from __future__ import annotations

from pathlib import Path

import pytest

from actckpt._show import plot
from actckpt._show.plot import plot_panels, plot_timelines


def test_picture_is_a_png_with_one_line_per_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    many = {f"method {index}": [(0.0, 0), (0.5, 2**20 * index), (1.0, 0)] for index in range(10)}
    plot_timelines(many, title="ten methods", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_ninth_line_does_not_look_like_the_first(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().add_subplot()
    plot._draw(axes, {f"method {index}": [(0.0, 0), (1.0, 2**20)] for index in range(16)})
    lines = [line for line in axes.get_lines() if str(line.get_label()).startswith("method")]
    looks = {(line.get_color(), line.get_linestyle(), str(line._unscaled_dash_pattern)) for line in lines}
    assert len(looks) == len(lines) == 16


def test_a_timeline_without_events_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_timelines({"nothing": []}, title="empty", path=tmp_path / "memory.png")
    assert (tmp_path / "memory.png").exists()


def test_panels_stand_side_by_side_in_an_svg_that_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = {"plain": [(0.0, 0), (0.5, 2**20), (1.0, 0)]}
    for name in ("first.svg", "second.svg"):
        plot_panels({"one order": lines, "another order": lines}, path=tmp_path / name)
    first = (tmp_path / "first.svg").read_text()
    assert first.startswith("<?xml")
    assert first == (tmp_path / "second.svg").read_text()
