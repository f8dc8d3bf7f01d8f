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

import actckpt
from actckpt import errors

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


def test_every_warning_has_the_category() -> None:
    for path in sorted(Path(actckpt.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                categories = [ast.unparse(argument) for argument in node.args[1:2]]
                assert categories in (["ActckptWarning"], ["DeprecationWarning"]), f"{path}:{node.lineno}"


def test_every_exception_of_the_package_is_in_the_tree() -> None:
    found = set(_exceptions())
    outside = {f"{kind.__module__}.{kind.__qualname__}" for kind in found if not issubclass(kind, errors.ActckptError)}
    assert outside == _INTERNAL


def test_every_error_of_the_tree_is_exported() -> None:
    tree = {kind for kind in _exceptions() if issubclass(kind, errors.ActckptError)}
    for kind in tree:
        assert kind.__name__ in errors.__all__ and getattr(errors, kind.__name__) is kind


def test_a_traceback_names_an_error_as_a_program_catches_it() -> None:
    for kind in {kind for kind in _exceptions() if issubclass(kind, errors.ActckptError)}:
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
    tree = {kind for kind in _exceptions() if issubclass(kind, errors.ActckptError)}
    assert drawn == {kind.__name__: kind.__mro__[1].__name__ for kind in tree}


def test_errors_of_the_engine_are_runtime_errors_and_can_be_pickled() -> None:
    assert issubclass(actckpt.errors.OffloadError, RuntimeError)
    for name in ("OffloadError", "OffloadReadError", "OffloadFullError", "ForkedError"):
        kind = getattr(actckpt.errors, name)
        error = pickle.loads(pickle.dumps(kind("no room")))
        assert type(error) is kind and str(error) == "no room" and kind.__module__ == "actckpt.errors"
