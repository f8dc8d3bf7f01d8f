"""One tree of errors: what the package raises on its own account is an ActckptError."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import actckpt
from actckpt import errors
from actckpt._core import sites
from actckpt._core.warning_texts import WarningText

#: Exceptions that end the run of a function, or a call, inside of the package, and never leave it.
_INTERNAL = {
    "actckpt._C.StopRerun",
    "actckpt._core.messages.HeldTensorChanged",
    "actckpt._rerun.region._Failed",
}


def _exceptions() -> Iterator[type[BaseException]]:
    names = [info.name for info in pkgutil.walk_packages(actckpt.__path__, "actckpt.")]
    for name in ["actckpt", *(name for name in names if not name.endswith("__main__"))]:
        for value in vars(importlib.import_module(name)).values():
            is_exception = inspect.isclass(value) and issubclass(value, BaseException)
            if is_exception and value.__module__.split(".")[0] == "actckpt" and not issubclass(value, Warning):
                yield value


def test_every_warning_has_a_text_with_the_category() -> None:
    calls = [
        (path.name, [ast.unparse(argument) for argument in node.args])
        for path in sorted(Path(actckpt.__path__[0]).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warnings.warn", "warn_explicit"))
    ]
    assert calls == [("sites.py", ["text.message(**values)", "text.category"])]
    assert {text.category for text in WarningText.all} == {errors.ActckptWarning, errors.ActckptDeprecationWarning}


def test_a_text_is_shown_once_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarningText, "all", [])
    monkeypatch.setattr(sites, "_shown", set())
    text = WarningText("{name} was ignored.", "Leave {name} out.", per="name")
    with pytest.warns(errors.ActckptWarning) as told:
        for name in ("a", "b", "a"):
            sites.warn_once(text, name, name=name)
    assert [str(one.message) for one in told] == [
        "a was ignored. Leave a out. Shown once per name.",
        "b was ignored. Leave b out. Shown once per name.",
    ]
    assert {one.filename for one in told} == {__file__}


def _tree() -> set[type[BaseException]]:
    return {kind for kind in _exceptions() if issubclass(kind, errors.ActckptError)}


def test_every_exception_of_the_package_is_in_the_tree_and_exported_under_its_public_name() -> None:
    outside = {f"{kind.__module__}.{kind.__qualname__}" for kind in {*_exceptions()} - _tree()}
    assert outside == _INTERNAL
    for kind in _tree():
        assert kind.__name__ in errors.__all__ and getattr(errors, kind.__name__) is kind
        assert traceback.format_exception_only(kind("why"))[-1] == f"actckpt.errors.{kind.__name__}: why\n"


def test_the_drawn_tree_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^( +[|` -]*)(\w+Error)\b", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        above = [(other, kind) for other, kind in above if other < depth]
        drawn[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    assert drawn == {kind.__name__: kind.__mro__[1].__name__ for kind in _tree()}


def test_errors_of_the_engine_are_runtime_errors_and_can_be_pickled() -> None:
    assert issubclass(actckpt.errors.OffloadError, RuntimeError)
    for name in ("OffloadError", "OffloadReadError", "OffloadFullError", "ForkedError"):
        kind = getattr(actckpt.errors, name)
        error = pickle.loads(pickle.dumps(kind("no room")))
        assert type(error) is kind and str(error) == "no room" and kind.__module__ == "actckpt.errors"
