"""Every example runs, in README.md, docs/, docstrings and examples/; every public name and setting is described."""

import dataclasses
import doctest
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.checkpoint

import actckpt
from actckpt import errors

_ROOT = Path(__file__).parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_SNIPPETS = [
    pytest.param(snippet, id=f"{page.name}-{number}")
    for page in _PAGES
    if page.name not in ("libraries.md", "transformers.md")  # tests/integrations has the libraries
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("snippet", _SNIPPETS)
def test_snippet_runs(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


_EXAMPLES = sorted((_ROOT / "examples").glob("*.py"))
#: Run by these tests, which have the packages or the processes that they need.
_ELSEWHERE = {
    name
    for folder in ("distributed", "integrations")
    for name in re.findall(r'"(\w+)\.py"', (_ROOT / f"tests/{folder}/test_examples.py").read_text())
}


@pytest.mark.parametrize(
    "example", [path for path in _EXAMPLES if path.stem not in _ELSEWHERE], ids=lambda path: path.stem
)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_examples_are_short_and_in_the_table_with_their_first_sentence() -> None:
    assert {path.stem for path in _EXAMPLES} >= _ELSEWHERE and len(_SNIPPETS) >= 4
    rows = dict(
        re.findall(
            r"^\| \[`\w+\.py`\]\(\.\./examples/(\w+)\.py\) \| (.*?) \|", (_ROOT / "docs/examples.md").read_text(), re.M
        )
    )
    assert rows == {path.stem: path.read_text().splitlines()[0].removeprefix('"""') for path in _EXAMPLES}
    assert max(len(path.read_text().splitlines()) for path in _EXAMPLES) <= 63


@pytest.mark.parametrize("name", ["api", "blocks", "comparison", "estimation", "planner.costs", "policies", "regions"])
def test_docstring_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"actckpt.{name}"))
    assert results.attempted > 0 == results.failed


def _anchors(text: str) -> list[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_a_page_is_short_names_nothing_private_and_its_links_are_not_broken(page: Path) -> None:
    text = page.read_text()
    assert len(re.sub(r"```.*?```|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE).split()) <= 600
    assert not re.findall(r"\bactckpt[./](?:\w+[./])*_(?!_)\w+|\bcsrc/\w+", text)
    for link in re.findall(r"\]\(([^):]+)\)", text):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {name}"
        anchors = [""]
        if heading:
            titles = re.findall(
                r"^#+ (.*)$", re.sub(r"```.*?```", "", target.read_text(), flags=re.DOTALL), re.MULTILINE
            )
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert heading in anchors, f"{page.name} links to {link}"


def test_files_that_are_named_for_maintainers_are_there() -> None:
    text = (_ROOT / "CONTRIBUTING.md").read_text()
    for named in re.findall(r"`((?:actckpt|csrc|tests|scripts)/[\w/]*(?:\.\w+)?)`", text):
        assert (_ROOT / named).exists(), named


_SECTIONS = {
    part.partition("\n")[0]: part
    for part in re.split(r"^## ", (_ROOT / "docs/reference.md").read_text(), flags=re.MULTILINE)
}


def test_the_reference_has_every_setting_with_its_default() -> None:
    described = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", _SECTIONS["Settings"], re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(actckpt.Settings)}
    assert list(described) == list(defaults)
    for name, text in described.items():
        megabytes = re.fullmatch(r"(\d+) MiB", text)
        assert (int(megabytes[1]) * 2**20 if megabytes else eval(text)) == defaults[name], name


def test_configure_describes_every_setting() -> None:
    text = inspect.getdoc(actckpt.configure) or ""  # without its indentation, which Python 3.13 leaves out
    documented = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert documented == [*(field.name for field in dataclasses.fields(actckpt.Settings)), "ValueError"]


def test_the_reference_has_every_field_of_stats() -> None:
    described = re.findall(r"^\| `(\w+)` \|", _SECTIONS["Stats"], re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(actckpt.Stats)]


@pytest.mark.parametrize("name", ["SavedTensorInfo", "Action"])
def test_fields_of_policies_are_described_in_the_reference_and_in_help(name: str) -> None:
    kind = getattr(actckpt, name)
    fields = (
        [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind.__members__)
    )
    rows = re.findall(r"^\| (`.*?`) \|", _SECTIONS[name], re.MULTILINE)
    assert [field for row in rows for field in re.findall(r"\w+", row)] == fields
    assert re.findall(r"^    (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE) == fields


def test_the_page_of_errors_is_what_its_script_makes() -> None:
    made = subprocess.run(
        [sys.executable, str(_ROOT / "scripts/errors_page"), "-"],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert made == (_ROOT / "docs/errors.md").read_text(), "run `python scripts/errors_page`"


def test_the_page_of_errors_says_of_each_when_it_appears_and_what_to_do() -> None:
    text = (_ROOT / "docs/errors.md").read_text()
    rows = [re.split(r" ?\| ?", row)[1:-1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    assert len(rows) > 40 and all(all(cells[:2]) for cells in rows)
    described = {cells[0].strip("`"): cells for cells in rows}
    assert all(described[name][2] for name in errors.__all__ if issubclass(getattr(errors, name), errors.ActckptError))


def test_the_reference_has_every_public_name() -> None:
    assert [name for name in actckpt.__all__ if f"`{name}`" not in _SECTIONS["Names"]] == []
    page = (_ROOT / "docs/errors.md").read_text() + _SECTIONS["Names"]
    assert [name for name in errors.__all__ if f"`{name}`" not in page.replace("`actckpt.errors.", "`")] == []


def test_the_reference_names_nothing_that_is_not_there() -> None:
    ours, _, from_torch = _SECTIONS["Names"].partition("Names of `torch.utils.checkpoint`")
    assert set(re.findall(r"`(\w+)`", ours)) <= set(actckpt.__all__)
    for name in re.findall(r"`(\w+)`", from_torch):
        assert getattr(actckpt, name, None) is getattr(torch.utils.checkpoint, name, None), name
