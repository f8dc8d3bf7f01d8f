"""Pictures of memory over time. matplotlib is optional and imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["plot_timelines"]

# Okabe and Ito: eight colours that people with any colour vision can tell apart.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_STYLES = ("-", "-", (0, (4, 2)), (0, (1, 1)))
_MIB = 2**20


def plot_timelines(timelines: Mapping[str, Sequence[tuple[float, int]]], *, title: str, path: Path) -> None:
    """Draw live bytes over one step, one line per name, as a PNG file.

    Args:
        timelines: `(seconds, live bytes)` after every change, as `LiveStorages` records them.
        title: what was run and where.
        path: of the file to write.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, timeline) in enumerate(timelines.items()):
        times_ms = [seconds * 1e3 for seconds, _ in timeline]
        sizes_mib = [size / _MIB for _, size in timeline]
        colour, style = _COLOURS[index % len(_COLOURS)], _STYLES[index % len(_STYLES)]
        peak = f"{name}: peak {max(sizes_mib, default=0):.1f} MiB"
        axes.step(times_ms, sizes_mib, where="post", color=colour, linestyle=style, linewidth=1.3, label=peak)
        axes.fill_between(times_ms, sizes_mib, step="post", color=colour, alpha=0.06, linewidth=0)
        if sizes_mib:
            at_peak = sizes_mib.index(max(sizes_mib))
            axes.plot(times_ms[at_peak], sizes_mib[at_peak], marker="o", markersize=4, color=colour)
    axes.set(xlabel="Time in one step, counter on (ms)", ylabel="Live activation storages (MiB)", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, format="png")
