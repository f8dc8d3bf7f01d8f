"""A page as HTML: charts as inline SVG, tables that a short script sorts. It loads nothing; all text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from actckpt._report_page.content import Cell, Chart, Page, Table
from actckpt._show.plot import draw_svg
from actckpt._version import __version__

__all__ = ["tables_as_html", "to_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 75rem;
       padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 0 2rem; }
.charts svg { width: 100%; height: auto; }
.left-out, .note, footer { color: #595959; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top;
         overflow-wrap: normal; }
th { background: #f3f3f3; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid #0072b2; }
th button::after { content: " \\2195"; color: #767676; }
th[aria-sort=ascending] button::after { content: " \\2191"; color: inherit; }
th[aria-sort=descending] button::after { content: " \\2193"; color: inherit; }
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  headers.forEach((header, column) => header.firstChild.addEventListener("click", () => {
    const isNumber = header.className === "number", before = header.getAttribute("aria-sort");
    const isDown = before ? before === "ascending" : isNumber;
    const key = row => row.cells[column].dataset.key ?? "-Infinity", text = row => row.cells[column].textContent;
    const compare = isNumber
      ? (a, b) => Number(key(a)) === Number(key(b)) ? 0 : Number(key(a)) < Number(key(b)) ? -1 : 1
      : (a, b) => text(a).localeCompare(text(b), "en", {numeric: true});
    headers.forEach(other => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    body.append(...[...body.rows].sort((a, b) => isDown ? compare(b, a) : compare(a, b)));
  }));
}
"""
#: A browser that reads the page may load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(page: Page, path: str | Path | None) -> str | None:
    """Write a page to a file, or return it if there is no path.

    Raises:
        OSError: the file cannot be written.
    """
    text = "\n".join(_document(page)) + "\n"
    if path is None:
        return text
    Path(path).write_text(text, encoding="utf-8")
    return None


def tables_as_html(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """Return lines and tables as part of another page, such as a notebook: without style and script."""
    return "\n".join([*_paragraphs(lines), *(line for table in tables for line in _table(table, is_sortable=False))])


def _document(page: Page) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(page.title)}</h1>"
    yield from _paragraphs(page.lines)
    charts, missing = _drawn(page.charts)
    if charts:
        yield "\n".join(['<div class="charts">', *charts, "</div>"])
    yield from _paragraphs([*missing, *page.left_out], kind="left-out")
    for table in page.tables:
        yield f"<h2>{escape(table.title)}</h2>"
        yield from ("<div class='scroll'>", *_table(table, is_sortable=True), "</div>")
        yield from _paragraphs([table.note] if table.note else [], kind="note")
    yield f"<footer><p>actckpt {escape(__version__)}</p></footer>\n<script>{_SCRIPT}</script>\n</body>\n</html>"


def _paragraphs(lines: Sequence[str], kind: str = "") -> list[str]:
    start = f'<p class="{kind}">' if kind else "<p>"
    return [f"{start}{escape(line)}</p>" for line in lines]


def _drawn(charts: Sequence[Chart]) -> tuple[list[str], list[str]]:
    """Return charts as HTML; or none, and a line that says why."""
    try:
        return [_figure(number, chart) for number, chart in enumerate(charts)], []
    except ImportError as error:
        return [], [f"{', '.join(chart.title for chart in charts)}: left out. {error}"]


def _figure(number: int, chart: Chart) -> str:
    svg = draw_svg(chart.draw)
    svg = re.sub(r'(\bid="|="#|url\(#)', rf"\g<1>chart{number}-", svg)  # ids of several charts in one page
    label = escape(chart.title)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f"<section><h2>{label}</h2>\n{svg}</section>"


def _table(table: Table, *, is_sortable: bool) -> Iterator[str]:
    numbers = [any(isinstance(row[at], Cell) for row in table.rows) for at in range(len(table.columns))]
    yield "<table>\n<thead><tr>"
    for name, is_number in zip(table.columns, numbers, strict=True):
        text = f'<button type="button">{escape(name)}</button>' if is_sortable else escape(name)
        yield f'<th scope="col"{_NUMBER if is_number else ""}>{text}</th>'
    yield "</tr></thead>\n<tbody>"
    for row in table.rows:
        yield f"<tr>{''.join(map(_cell, row))}</tr>"
    yield "</tbody>\n</table>"


_NUMBER = ' class="number"'


def _cell(cell: str | Cell) -> str:
    if not isinstance(cell, Cell):
        return f"<td>{escape(cell)}</td>"
    key = "" if cell.key is None or not math.isfinite(cell.key) else f' data-key="{cell.key!r}"'
    return f"<td{_NUMBER}{key}>{escape(cell.text)}</td>"
