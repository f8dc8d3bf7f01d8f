"""Frontiers as pictures: peak and step time over plain training's, a marker per method, budgets as a line.

    python benchmarks/frontier_pictures.py DIR/result.json

draws a picture for each part of a run of `gpu_run.py` that has methods side by side, as DIR/PART.svg. `gpu_run.py` does
so itself where matplotlib is installed. `scripts/pictures` draws those of the documentation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

__all__ = ["Points", "draw", "draw_parts", "points_of"]

#: By method: peak and step time over those of plain training.
Points = dict[str, tuple[float, float]]

#: Steps over plain above this are only in the legend.
_HIGHEST = 1.8
_BUDGET = "actckpt budget "
#: Colours for a light and for a dark background: that of the first part that a method's name has.
_COLORS = {"plain": "#808080", "actckpt": "#2a85d0", "compiled": "#9467bd", "torch ": "#e07b00", "": "#3f9b57"}
#: Of the methods of one colour, in their order.
_MARKERS = "^sDvPX<>hp*d"
#: A reader's browser that prefers dark pages shows dark pictures.
_DARK = """@media (prefers-color-scheme: dark) {
text {fill: #e6e6e6}
[style*="fill: #ffffff"] {fill: #0d1117 !important}
[style*="stroke: #000000"] {stroke: #e6e6e6 !important}
}"""


def points_of(rows: dict[str, Any]) -> Points:
    """Return the points of methods that were timed in turns, from the rows of a part of `gpu_run.py`."""
    plain, ratios = rows.get("plain", {}).get("peak_allocated_bytes"), rows.get("ratios to plain", {})
    measured = {name: row["peak_allocated_bytes"] for name, row in rows.items() if "peak_allocated_bytes" in row}
    return {
        name: (round(peak / plain, 3), round(ratios[name]["median"], 3))
        for name, peak in measured.items()
        if plain and name in ratios
    }


def draw(points: Points, title: str, path: Path) -> None:
    """Write the picture of a frontier as SVG, with the points in its metadata."""
    from matplotlib import pyplot

    style = {"svg.hashsalt": "actckpt", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
        for name, line in _lines(points):
            axes.plot(*zip(*line, strict=True), "o-", label=f"{name}budgets", color=_color(name), zorder=3)
        for name, marker in _markers(points):
            peak, ratio = points[name]
            is_shown = ratio <= _HIGHEST
            label = name if is_shown else f"{name} ({peak:.2f}, {ratio:.2f}: not shown)"
            place = ([peak], [ratio]) if is_shown else ([], [])
            axes.plot(*place, marker, color=_color(name), label=label, markersize=6, linestyle="none")
        axes.set(xlabel="peak over plain", ylabel="step over plain")
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#808080", alpha=0.25)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        metadata = {"Date": None, "Creator": None, "Description": json.dumps(points)}
        figure.savefig(path, metadata=metadata)
        pyplot.close(figure)
    text = path.read_text().replace("</style>", f"{_DARK}</style>", 1)
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def _lines(points: Points) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield the budgets of each kind, by peak."""
    names = [name for name in points if _BUDGET in name]
    for kind in dict.fromkeys(name.partition(_BUDGET)[0] for name in names):
        yield f"{kind}actckpt, ", sorted(points[name] for name in names if name.startswith(f"{kind}{_BUDGET}"))


def _markers(points: Points) -> Iterator[tuple[str, str]]:
    """Yield the methods other than budgets, and their markers."""
    for color in _COLORS.values():
        yield from zip([name for name in points if _BUDGET not in name and _color(name) == color], cycle(_MARKERS))


def _color(name: str) -> str:
    return next(color for part, color in _COLORS.items() if part in name)


def draw_parts(parts: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the parts of a run of `gpu_run.py` that have other methods beside plain training; return the files."""
    drawn = []
    for part, found in parts.items():
        rows = found.get("rows", {})
        if len(points := points_of(rows)) > 1:
            drawn.append(folder / f"{part}.svg")
            draw(points, f"{part}: {rows['plain']['model']}, {rows['plain']['versions']['gpu']}", drawn[-1])
    return drawn


def main() -> None:
    result = Path(sys.argv[1])
    for path in draw_parts(json.loads(result.read_text())["parts"], result.parent):
        print(path)


if __name__ == "__main__":
    main()
