"""Every example runs: in README.md, docs/, docstrings and examples/."""

import doctest
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import actckpt.api
import actckpt.blocks
import actckpt.policies
import actckpt.regions

_ROOT = Path(__file__).parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_SNIPPETS = [
    pytest.param(snippet, id=f"{page.name}-{number}")
    for page in _PAGES
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("snippet", _SNIPPETS)
def test_snippet_runs(snippet: str) -> None:
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_there_are_snippets_to_run() -> None:
    assert len(_SNIPPETS) >= 4


@pytest.mark.parametrize("example", sorted((_ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "module", [actckpt.api, actckpt.blocks, actckpt.policies, actckpt.regions], ids=lambda module: module.__name__
)
def test_docstring_examples_run(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_to_files_are_not_broken(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
