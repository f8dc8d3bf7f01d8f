"""Pages of plans, reports and profiles: one file that loads nothing and says what the objects know."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_pages import NAME, Found, Parsed

import actckpt

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
