"""Plain data read as dataclasses: each field as its annotation says, with errors that name it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from actckpt._error_base import CostTableError
from actckpt._text.suggestions import did_you_mean

__all__ = ["as_table", "check_names", "missing", "plain_data", "read", "read_fields", "read_json"]

#: More than this is a sign of a wrong unit: by the end of the names of numbers, what they are of, and the most.
_UNITS = {
    "bytes_per_s": (" of bytes per second", 2**63),
    "bytes": (" of bytes", 2**50),
    "_s": (" of seconds", 24 * 3600),
    "": ("", math.inf),
}
_WORDS = {str: "a text that is not empty", bool: "true or false", int: "a whole number"}


def read(kind: Any, found: Any, where: str, *, least: float = 0.0, most: float | None = None) -> Any:
    """Return plain data as what an annotation says.

    Args:
        where: the name of the data in errors.
        least, most: limits of numbers; None: that of their unit.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    limits: dict[str, Any] = {"least": least, "most": most}
    if origin in (types.UnionType, typing.Union):
        return None if found is None else read(args[0], found, where, **limits)
    if origin is Mapping:
        return {name: read(args[1], each, f"{where}.{name}", **limits) for name, each in as_table(found, where).items()}
    if origin is tuple or (isinstance(kind, type) and issubclass(kind, tuple)):
        if not isinstance(found, (list, tuple)):
            raise CostTableError(f"{where} is {found!r}. It must be a list.")
        kinds = [args[0]] * len(found) if args[1:] == (...,) else args or _hints(kind).values()
        if len(kinds) != len(found):
            raise CostTableError(f"{where} has {len(found)} entries. It must have {len(kinds)}.")
        each = [read(*both, f"{where}[{n}]", **limits) for n, both in enumerate(zip(kinds, found, strict=True))]
        return tuple(each) if args else kind(*each)
    if hasattr(kind, "from_dict"):
        return kind.from_dict(found)
    if dataclasses.is_dataclass(kind):
        given = read_fields(kind, found, where)
        return kind._checked(given, where) if hasattr(kind, "_checked") else kind(**given)  # type: ignore[operator]
    if kind is float:
        return _number(found, where, least, most)
    if kind in _WORDS and (not isinstance(found, kind) or found == "" or (kind is int and isinstance(found, bool))):
        raise CostTableError(f"{where} is {found!r}. It must be {_WORDS[kind]}.")
    if kind is int:
        return _number(found, where, least, most)
    return kind(found) if isinstance(kind, type) and issubclass(kind, enum.Enum) else found


_hints = functools.cache(typing.get_type_hints)


def _number(found: Any, where: str, least: float, most: float | None) -> float:
    of, usual_most = next(unit for ending, unit in _UNITS.items() if where.endswith(ending))
    if not isinstance(found, numbers.Real) or isinstance(found, bool):
        raise CostTableError(f"{where} is {found!r}. It must be a number{of}.")
    number = int(found) if isinstance(found, numbers.Integral) else float(found)
    if not number >= least:
        raise CostTableError(f"{where} is {number}. It must be a number{of} from {least:g} on.")
    if number > (usual_most if most is None else most):
        unit = of.removeprefix(" of ")
        raise CostTableError(f"{where} is {number}, more than {usual_most:.3g} {unit}. Is it in {unit}?")
    return number


def as_table(found: Any, where: str) -> Mapping[str, Any]:
    """Return plain data that is a table (a JSON object)."""
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise CostTableError(f"{where} is a {type(found).__name__}. It must be a table of named fields.")
    return found


def read_fields(cls: Any, found: Any, where: str) -> dict[str, Any]:
    """Return the fields of a dataclass that plain data gives."""
    table = as_table(found, where)
    fields = {field.metadata.get("key", field.name): field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = did_you_mean([key], list(fields), show=repr)
            raise CostTableError(f"{where} has an unknown field {key!r}. Known: {', '.join(fields)}.{near}")
    given: dict[str, Any] = {}
    for key, field in fields.items():
        if table.get(key) is not None:
            limits = {name: field.metadata[name] for name in ("least", "most") if name in field.metadata}
            given[field.name] = read(_hints(cls)[field.name], table[key], f"{where}.{key}", **limits)
        elif field.default is dataclasses.MISSING:
            raise missing(key, where)
    return given


def missing(key: str, where: str) -> CostTableError:
    """Return the error for a field that must be there."""
    return CostTableError(f"{where} has no field {key!r}. It must have one; see docs/planning.md.")


def plain_data(found: Any) -> Any:
    """Return dataclasses as plain data, without fields that hold nothing or no limit."""
    if isinstance(found, enum.Enum):
        return found.value
    if dataclasses.is_dataclass(found):
        fields = {field.metadata.get("key", field.name): field.name for field in dataclasses.fields(found)}
        given = {key: getattr(found, name) for key, name in fields.items()}
        return {key: plain_data(each) for key, each in given.items() if each is not None and each != math.inf}
    if isinstance(found, Mapping):
        return {key: plain_data(each) for key, each in found.items()}
    return [plain_data(each) for each in found] if isinstance(found, (list, tuple)) else found


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise where one of the names is not among those known."""
    known = list(known)
    for index, name in enumerate(names):
        if name not in known:
            near = did_you_mean([name], known, show=repr)
            raise CostTableError(f"{where}[{index}] is {name!r}, which is not there.{near}")


def read_json(path: str | Path, *, what: str, instead: str) -> Any:
    """Return the content of a JSON file.

    Args:
        what: what the file should be, for errors.
        instead: what to do, for errors.
    Raises:
        OSError: the file cannot be read.
        CostTableError: it is no JSON, or nested too deep.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise CostTableError(f"{path} is no {what}: it is nested too deep. {instead}") from None
    except ValueError as error:
        raise CostTableError(f"{path} is no JSON: {error}. {instead}") from None
