"""The table of tests that do not run on the simulated device names tests that there are, and few of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import device_exemptions
import pytest

FOLDERS = ("offload", "replay", "rerun")
_NAMES = {*device_exemptions.EXEMPT, *device_exemptions.EXEMPT_ON_GPU, *device_exemptions.CHANGING}


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def test_exempt_tests_exist_and_are_at_most_a_tenth() -> None:
    here, collected = Path(__file__).parent, _Collected()
    folders = [str(here / folder) for folder in FOLDERS]
    files = {str(here.parent / key.partition("::")[0]) for key in _NAMES if key.startswith("contract/")}
    assert pytest.main([*folders, *files, "--collect-only", "-qq"], plugins=[collected]) == 0
    items = [item for item in collected.items if item.path.parent.name in FOLDERS]
    found = [item for item in items if device_exemptions.why_exempt(item)]
    assert 0 < len(found) * 10 <= len(items)
    assert all((here / name).exists() for name in device_exemptions.FILES)
    for key in _NAMES:
        name, needed = device_exemptions.split(key)
        named = (words for test, words in map(device_exemptions.words_of, collected.items) if test == name)
        assert any(needed <= words for words in named), f"{key}: no such test"


def _decided_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported: all but the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                yield from (part, *_decided_at_import(part))
        elif not isinstance(node, ast.Lambda):
            yield from (node, *_decided_at_import(node))


def _asks_for_device(node: ast.AST) -> bool:
    names = ("on_device.device_type", "torch.accelerator.is_available")
    return (isinstance(node, ast.Attribute) and ast.unparse(node) in names) or (
        isinstance(node, ast.ImportFrom)
        and node.module == "on_device"
        and any(name.name == "device_type" for name in node.names)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@skipif(on_device.device_type != 'cpu')\ndef f(): ...", 1),
        ("class C:\n  @skipif(on_device.device_type != 'cpu')\n  def f(self): ...", 1),
        ("KINDS = [1] if torch.accelerator.is_available() else []", 1),
        ("from on_device import device_type", 1),
        ("def f():\n  if on_device.device_type != 'cpu': skip('why')", 0),
    ],
)
def test_what_is_decided_at_import_is_found(text: str, expected: int) -> None:
    assert sum(map(_asks_for_device, _decided_at_import(ast.parse(text)))) == expected


def test_no_mark_asks_for_the_device_before_it_is_set() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        found = [node for node in _decided_at_import(ast.parse(path.read_text())) if _asks_for_device(node)]
        where = [f"{path.name}:{getattr(node, 'lineno', 0)}" for node in found]
        assert not found, f"{where}: the device of tests is set later. Skip inside of the test, or in a fixture."
