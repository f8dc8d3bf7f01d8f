"""Pictures of memory over time. matplotlib is optional and imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "new_figure", "plot_panels", "plot_points", "plot_timelines", "save_figure"]

# Okabe and Ito: eight colours that people with any colour vision can tell apart.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_STYLES = ("-", "-", (0, (4, 2)), (0, (1, 1)))
_MIB = 2**20

#: `(seconds, live bytes)` after every change, by name.
Timelines = Mapping[str, Sequence[tuple[float, int]]]


def plot_timelines(timelines: Timelines, *, title: str, path: Path) -> None:
    """Draw live bytes over one step, one line per name, as a PNG or SVG file.

    Args:
        timelines: `(seconds, live bytes)` after every change, as `LiveStorages` records them.
        title: what was run and where.
        path: of the file to write; its suffix says in which format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    plot_panels({title: timelines}, path=path)


def plot_panels(panels: Mapping[str, Timelines], *, path: Path) -> None:
    """Draw pictures of `plot_timelines` side by side, with one scale of bytes; arguments and errors as there.

    Args:
        panels: the lines of each picture, by its title.
        path: of the file to write; its suffix says in which format.
    """
    figure = new_figure(width=9 if len(panels) == 1 else 6.5 * len(panels))
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, timelines) in zip(columns, panels.items(), strict=True):
        _draw(axes, timelines)
        axes.set(xlabel="Time in one step, counter on (ms)", title=title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)  # hides no line
    columns[0].set_ylim(bottom=0)  # once every panel is drawn, as they share it
    columns[0].set(ylabel="Live activation storages (MiB)")
    save_figure(figure, path)


def plot_points(points: Mapping[str, tuple[float, float, float, float]], *, path: Path) -> None:
    """Draw time against memory, one point per name, as a PNG or SVG file.

    Args:
        points: peak bytes, and the time as a ratio to that of the first name: median, lowest and highest.
        path: of the file to write; its suffix says in which format.

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
    """Return an empty figure, `width` inches wide; raises ImportError where matplotlib cannot be imported."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    except ImportError as error:
        raise ImportError(
            f"A picture needs matplotlib, which cannot be imported ({error}). pip install 'actckpt[plot]' brings it."
        ) from error
    return Figure(figsize=(width, 4.8), dpi=150, layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; its suffix says in which format."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "actckpt"}):  # else every run writes other ids
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axes: Axes, timelines: Timelines) -> None:
    for index, (name, timeline) in enumerate(timelines.items()):
        times_ms = [seconds * 1e3 for seconds, _ in timeline]
        sizes_mib = [size / _MIB for _, size in timeline]
        round_number, place = divmod(index, len(COLOURS))
        colour, style = COLOURS[place], _STYLES[(place + 2 * round_number) % len(_STYLES)]
        peak = f"{name}: peak {max(sizes_mib, default=0):.1f} MiB"
        axes.step(times_ms, sizes_mib, where="post", color=colour, linestyle=style, linewidth=1.3, label=peak)
        axes.fill_between(times_ms, sizes_mib, step="post", color=colour, alpha=0.06, linewidth=0)
        if sizes_mib:
            at_peak = sizes_mib.index(max(sizes_mib))
            axes.plot(times_ms[at_peak], sizes_mib[at_peak], marker="o", markersize=4, color=colour)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
