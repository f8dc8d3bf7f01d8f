"""Pages of plans, reports and profiles: files that load nothing and say what the objects know; some in Chromium."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actckpt
from actckpt.memory_profile import ProfileRow

#: What would be a script, were it not escaped.
NAME = "<script>console['error']('run' + \"&\")</script>"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.add_module(NAME, nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(NAME)(self.norm(x))
        return x + y


class Found:
    """A plan, and the report and the profile of its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 1))
        x = torch.randn(64, 32)

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        self.profile = actckpt.profile(step, model=model)
        self.plan = actckpt.plan(step, model=model, activation_budget="60%")
        actckpt.apply(model, policy=self.plan)
        step()
        self.report = actckpt.report(model, top=1)
        actckpt.remove(model)
        actckpt.apply(model)
        step()
        self.report_without_plan = actckpt.report(model)
        self.all = {
            "report": self.report,
            "report without plan": self.report_without_plan,
            "plan": self.plan,
            "profile": self.profile,
        }

    def page(self, name: str) -> str:
        """Return the page of one of them."""
        page = self.all[name].to_html()
        assert page is not None
        return page


class Parsed(HTMLParser):
    """The elements of a page, its text by element, and its tables as rows of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._path: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._path.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._path):
            self.text += data
        if {"th", "td"} & set(self._path):
            self.tables[-1][-1][-1] += data

    def column(self, table: int, name: str) -> list[str]:
        """Return the cells of a column."""
        header, *rows = self.tables[table]
        return [row[header.index(name)] for row in rows]


_NAMES = ("report", "report without plan", "plan", "profile")


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


@pytest.mark.parametrize("name", _NAMES)
def test_a_page_loads_nothing(name: str, found: Found) -> None:
    page = found.page(name)
    for tag, attributes in Parsed(page).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert all(value.startswith("#") for key, value in attributes.items() if key.endswith("href"))
    assert "://" not in page and "@import" not in page
    assert not re.search(r"url\((?!#)|\b(fetch|XMLHttpRequest|WebSocket|import)\b\(", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("name", _NAMES)
def test_names_of_modules_are_escaped(name: str, found: Found) -> None:
    page = found.page(name)
    parsed = Parsed(page)
    assert NAME in parsed.text and NAME not in page
    assert [tag for tag, _ in parsed.elements].count("script") == 1
    notebook = Parsed(found.all[name]._repr_html_())
    assert NAME in notebook.text and "script" not in {tag for tag, _ in notebook.elements}


def test_each_row_of_a_profile_is_in_its_table(found: Found) -> None:
    parsed = Parsed(found.page("profile"))
    columns = (parsed.column(0, name) for name in ("module", "operator", "phase", "tensors"))
    rows = [(row.module, row.operator, row.phase, str(row.count)) for row in found.profile.rows]
    assert list(zip(*columns, strict=True)) == rows


@pytest.mark.parametrize("name", ["report", "report without plan"])
def test_each_module_and_operator_of_a_report_is_in_its_table_whatever_its_rows_are(name: str, found: Found) -> None:
    report, parsed = found.all[name], Parsed(found.page(name))
    assert isinstance(report, actckpt.ModelReport)
    names = [
        f"{module}::{operator}" for module, operator in zip(*map(_of(parsed), ("module", "operator")), strict=True)
    ]
    assert names == [row.name for row in report.detail_rows]
    for kind in ("kept_bytes", "recomputed_bytes", "offloaded_bytes"):
        assert sum(getattr(row, kind) for row in report.detail_rows) == getattr(report, kind)
    assert len(names) > len(report.rows)


def _of(parsed: Parsed, table: int = 0) -> Callable[[str], list[str]]:
    return lambda name: parsed.column(table, name)


def test_each_value_and_each_trial_of_a_plan_is_in_its_page(found: Found) -> None:
    parsed = Parsed(found.page("plan"))
    values = {value.name for block in found.plan.costs.blocks for value in block.values if value.nbytes}
    assert set(parsed.column(0, "value")) == values
    modules, operators = parsed.column(0, "module"), parsed.column(0, "operator")
    assert {f"{NAME}.0", f"{NAME}.1", "norm"} <= set(modules) and "aten.gelu.default" in operators
    assert [name.removesuffix(" (chosen)") for name in parsed.column(1, "trial")] == [t.name for t in found.plan.race]
    assert f"{found.plan.chosen} (chosen)" in parsed.column(1, "trial")
    for line in found.plan.explain().splitlines():
        assert line in parsed.text


def test_the_page_of_a_report_has_what_that_of_its_plan_has(found: Found) -> None:
    report, plan = Parsed(found.page("report")), Parsed(found.page("plan"))
    assert report.tables[1:] == plan.tables
    assert "budget" in report.text and "this plan: " in report.text, "legends of both charts"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report without plan", "Memory over a step, Time against memory, trials: left out. There is no plan"),
        ("profile", "Memory over a step: left out. A profile has the peak of the step"),
    ],
)
def test_a_page_says_why_it_has_no_chart(name: str, said: str, found: Found) -> None:
    page = found.page(name)
    assert said in Parsed(page).text and "<svg" not in page


def test_a_plan_without_trials_says_so(found: Found) -> None:
    parsed = Parsed(dataclasses.replace(found.plan, race=()).to_html() or "")
    assert len(parsed.tables) == 1 and "made without trials" in parsed.text


def test_without_matplotlib_a_page_has_its_tables_and_says_what_to_install(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Parsed(found.page("plan")).tables
    assert found.page("plan").count("<svg") == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = found.page("plan")
    assert Parsed(page).tables == tables and "<svg" not in page
    assert Parsed(page).text.count("pip install 'actckpt[plot]'") == 1


@pytest.mark.parametrize("name", _NAMES)
def test_a_page_is_the_same_each_time_and_as_a_file(name: str, found: Found, tmp_path: Path) -> None:
    page = found.page(name)
    assert found.page(name) == page
    assert found.all[name].to_html(tmp_path / "page.html") is None
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    with pytest.raises(FileNotFoundError):
        found.all[name].to_html(tmp_path / "no" / "page.html")


def test_a_plan_that_was_saved_has_the_same_page(found: Found, tmp_path: Path) -> None:
    found.plan.save(tmp_path / "plan.json")
    assert actckpt.Plan.load(tmp_path / "plan.json").to_html() == found.page("plan")


@pytest.mark.parametrize("name", _NAMES)
def test_ids_of_a_page_are_unique_and_those_that_are_used_are_there(name: str, found: Found) -> None:
    page = found.page(name)
    ids = [attributes["id"] for _, attributes in Parsed(page).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) <= {(each, "") for each in ids} | {
        ("", each) for each in ids
    }


def test_a_notebook_shows_the_table(found: Found) -> None:
    for name in ("report", "profile"):
        assert Parsed(found.all[name]._repr_html_()).tables[0] == Parsed(found.page(name)).tables[0]
    notebook = Parsed(found.plan._repr_html_())
    assert notebook.tables == Parsed(found.page("plan")).tables[:1] and repr(found.plan) in notebook.text


_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_in_browser = pytest.mark.skipif(_BROWSER is None, reason="no Chromium is installed: apt-get install chromium")

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


def _opened(page: str, folder: Path, *, width: int = 1280) -> tuple[str, list[str]]:
    """Open a page from a file; return its document afterwards, and what is in the console."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    options += ["--enable-logging=stderr", "--dump-dom", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    command = [str(_BROWSER), *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _seen(document: str) -> Any:
    return json.loads(unescape(re.findall(r"<output>(.*?)</output>", document, re.DOTALL)[0]))


@_in_browser
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


@_in_browser
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


@_in_browser
def test_an_error_in_the_console_is_found(found: Found, tmp_path: Path) -> None:
    broken = '<script>throw new Error("mine")</script><img src="https://127.0.0.1/x.png"></body>'
    _, messages = _opened(found.page("profile").replace("</body>", broken), tmp_path)
    assert any("mine" in line for line in messages)
    assert any("Content Security Policy" in line for line in messages), "nothing can be loaded"
