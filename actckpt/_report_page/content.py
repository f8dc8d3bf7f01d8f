"""What a page says, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from actckpt._text.sizes import format_bytes, format_seconds

__all__ = ["Cell", "Chart", "Page", "Table", "bytes_cell", "number_cell", "seconds_cell", "share_cell"]


class Cell(NamedTuple):
    """A cell of a table that is sorted by a number."""

    text: str
    #: None: sorted below all numbers.
    key: float | None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; columns with a `Cell` are sorted by number, others by text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart: `draw` draws it into matplotlib's axes."""

    title: str
    draw: Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Page:
    """The parts of a page, in their order in it."""

    title: str
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    #: Which charts and tables the page has not, and why: one line each.
    left_out: Sequence[str] = ()
    tables: Sequence[Table] = ()


def bytes_cell(nbytes: float) -> Cell:
    """Return a size, sorted by bytes."""
    return Cell(format_bytes(nbytes), nbytes)


def seconds_cell(seconds: float | None) -> Cell:
    """Return a time, sorted by seconds; empty for none and for 0."""
    return Cell(format_seconds(seconds) if seconds else "", seconds or None)


def number_cell(number: int) -> Cell:
    """Return a count."""
    return Cell(str(number), number)


def share_cell(share: float) -> Cell:
    """Return a share in percent."""
    return Cell(f"{100 * share:.1f} %", share)
