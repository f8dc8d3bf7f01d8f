"""Plots. matplotlib is optional and imported late."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "draw_svg", "new_figure", "plot_points", "save_figure"]

# Okabe and Ito: eight colours that people with any colour vision can distinguish.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_MIB = 2**20


def plot_points(points: Mapping[str, tuple[float, float, float, float]], *, path: Path) -> None:
    """Plot time against memory, one point per name, as a PNG or SVG file.

    Args:
        points: peak bytes, and the time as a ratio to that of the first name: median, lowest and highest.
        path: of the file to write; its suffix selects the format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = new_figure(width=7)
    axes = figure.subplots()
    for index, (name, (nbytes, median, lowest, highest)) in enumerate(points.items()):
        spread = [[median - lowest], [highest - median]]
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(nbytes / _MIB, median, yerr=spread, fmt="o", capsize=3, color=colour, label=name)
    axes.set(xlabel="Peak activation storages (MiB)", ylabel=f"Step time, {next(iter(points))} = 1")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_figure(figure, path)


def new_figure(width: float) -> Figure:
    """Return an empty figure, `width` inches wide; raises ImportError if matplotlib cannot be imported."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    except ImportError as error:
        raise ImportError(
            f"A picture needs matplotlib, which cannot be imported ({error}). pip install 'actckpt[plot]' brings it."
        ) from error
    return Figure(figsize=(width, 4.8), dpi=150, layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; its suffix selects the format."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "actckpt"}):  # otherwise every run writes other ids
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_svg(draw: Callable[[Any], None]) -> str:
    """Return what `draw` draws into axes, as an SVG element for an HTML page: its text stays text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(width=7)
    draw(figure.subplots())
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "actckpt", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])  # HTML knows these names itself
