"""Pages in a headless Chromium, from files: no message in the console, and headers sort the tables."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_pages import Found

import actckpt
from actckpt.memory_profile import ProfileRow

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(_BROWSER is None, reason="no Chromium is installed: apt-get install chromium")

#: Clicks each header twice and notes the keys of its column; then what the page looks like.
_PROBE = """<script>
const seen = {sorted: [], width: document.documentElement.scrollWidth, window: innerWidth,
              charts: [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().height)};
for (const table of document.querySelectorAll("table"))
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    for (const _ of [1, 2]) {
      header.querySelector("button").click();
      const cells = [...table.tBodies[0].rows].map(row => row.cells[column]);
      seen.sorted.push([header.getAttribute("aria-sort"), header.className === "number",
                        cells.map(cell => cell.dataset.key ?? null), cells.map(cell => cell.textContent)]);
    }
  });
const written = document.createElement("output");
written.textContent = JSON.stringify(seen);
document.body.append(written);
</script>"""


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


def _opened(page: str, folder: Path, *, width: int = 1280) -> tuple[str, list[str]]:
    """Open a page from a file; return its document afterwards, and what is in the console."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    options += ["--enable-logging=stderr", "--dump-dom", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    command = [str(_BROWSER), *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _seen(document: str) -> Any:
    return json.loads(unescape(re.findall(r"<output>(.*?)</output>", document, re.DOTALL)[0]))


@pytest.mark.parametrize("name", ["report", "report without plan", "profile"])
def test_a_page_works_from_a_file(name: str, found: Found, tmp_path: Path) -> None:
    page = found.page(name)
    document, messages = _opened(page.replace("</body>", f"{_PROBE}</body>"), tmp_path)
    assert messages == []
    seen = _seen(document)
    assert seen["width"] <= seen["window"], "no part is wider than the window"
    assert len(seen["charts"]) == (2 if name == "report" else 0) and all(height > 200 for height in seen["charts"])
    assert len(seen["sorted"]) >= 2 * 6
    for (way, is_number, keys, texts), (other_way, _, _, other_texts) in _pairs(seen["sorted"]):
        assert [way, other_way] == (["descending", "ascending"] if is_number else ["ascending", "descending"])
        assert texts == other_texts[::-1], "rows with equal cells have equal texts"
        numbers = [float("-inf") if key is None else float(key) for key in keys]
        assert not is_number or numbers == sorted(numbers, reverse=True)


def _pairs(found: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(found[::2], found[1::2], strict=True)


def test_names_are_sorted_by_the_numbers_in_them_and_sizes_by_bytes(tmp_path: Path) -> None:
    sizes = {"layers.10": 2**20, "layers.2": 2**10, "head": 1000}
    rows = [ProfileRow(module, "aten.mm.default", "forward", nbytes, 1) for module, nbytes in sizes.items()]
    profile = actckpt.MemoryProfile(sum(sizes.values()), "forward", 0, 0, tuple(rows))
    document, messages = _opened((profile.to_html() or "").replace("</body>", f"{_PROBE}</body>"), tmp_path)
    seen = _seen(document)
    assert messages == []
    assert seen["sorted"][0][-1] == ["head", "layers.2", "layers.10"]
    assert seen["sorted"][8][-1] == ["1.00 MiB", "1.00 KiB", "1000 B"]
    assert seen["sorted"][9][-1] == ["1000 B", "1.00 KiB", "1.00 MiB"]


def test_an_error_in_the_console_is_found(found: Found, tmp_path: Path) -> None:
    broken = '<script>throw new Error("mine")</script><img src="https://127.0.0.1/x.png"></body>'
    _, messages = _opened(found.page("profile").replace("</body>", broken), tmp_path)
    assert any("mine" in line for line in messages)
    assert any("Content Security Policy" in line for line in messages), "nothing can be loaded"
