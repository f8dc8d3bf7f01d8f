"""Plain data read as dataclasses: each field as its annotation says, with errors that name it."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from actckpt._error_base import CostTableError

__all__ = [
    *("CHANGE", "LIMIT", "NUMBER", "as_table", "check_names", "list_of", "missing", "nearest", "plain_data"),
    *("read_fields", "read_flag", "read_json", "read_names", "read_text"),
]

#: Returns what a field holds, checked. The text is the name of the field in errors.
Reader = Callable[[Any, str], Any]

#: Plans and cost tables have fewer than 10 levels.
_MAX_LEVELS = 100


def _number(of: str, most: float, *, least: float = 0.0) -> Reader:
    """Return a reader of numbers of something. More than `most` is a sign of a wrong unit."""

    def read(found: Any, where: str) -> float:
        if not isinstance(found, numbers.Real) or isinstance(found, bool):
            raise CostTableError(f"{where} is {found!r}. It must be a number{of}.")
        number = int(found) if isinstance(found, numbers.Integral) else float(found)
        if not number >= least:
            raise CostTableError(f"{where} is {number}. It must be a number{of} from 0 on.")
        if number > most:
            unit = of.removeprefix(" of ")
            raise CostTableError(f"{where} is {number}, more than {most:.3g} {unit}. Is it in {unit}?")
        return number

    return read


def read_text(found: Any, where: str) -> str:
    """Return a text."""
    if not isinstance(found, str) or not found:
        raise CostTableError(f"{where} is {found!r}. It must be a text that is not empty.")
    return found


def read_flag(found: Any, where: str) -> bool:
    """Return true or false."""
    if not isinstance(found, bool):
        raise CostTableError(f"{where} is {found!r}. It must be true or false.")
    return found


def list_of(read: Reader) -> Reader:
    """Return a reader of lists."""

    def read_all(found: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(found, (list, tuple)):
            raise CostTableError(f"{where} is {found!r}. It must be a list.")
        return tuple(read(each, f"{where}[{index}]") for index, each in enumerate(found))

    return read_all


def _entry(found: Any, where: str) -> int:
    """Return a number of an entry of the stack, or -1."""
    if not isinstance(found, int) or isinstance(found, bool):
        raise CostTableError(f"{where} is {found!r}. It must be the number of a block.")
    return found


def read_names(found: Any, where: str) -> tuple[str, ...]:
    """Return a list of names."""
    if isinstance(found, (list, tuple)) and not all(isinstance(each, str) for each in found):
        raise CostTableError(f"{where} is {found!r}. It must be a list of names.")
    return tuple(list_of(read_text)(found, where))


#: Any number from 0 on; bytes that may be below zero; a limit, which may be larger than any memory.
NUMBER = _number("", math.inf)
CHANGE = _number(" of bytes", 2**50, least=-math.inf)
LIMIT = _number(" of bytes", 2**63)

#: Numbers are read by the end of their names, other fields by their annotations.
_NUMBERS = {
    "bytes_per_s": _number(" of bytes per second", 2**63),
    "bytes": _number(" of bytes", 2**50),
    "s": _number(" of seconds", 24 * 3600),
}
_READERS: dict[str, Reader] = {
    "str": read_text,
    "bool": read_flag,
    "int": _entry,
    "tuple[int, ...]": list_of(_entry),
    "tuple[str, ...]": read_names,
}


def as_table(found: Any, where: str) -> Mapping[str, Any]:
    """Return plain data that is a table (a JSON object)."""
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise CostTableError(f"{where} is a {type(found).__name__}. It must be a table of named fields.")
    return found


def read_fields(cls: type[Any], found: Any, where: str, **readers: Reader) -> dict[str, Any]:
    """Return the fields of a dataclass that plain data gives.

    Args:
        where: the name of the data in errors.
        readers: of fields whose name and annotation do not say how to read them.
    """
    table = as_table(found, where)
    fields = {field.metadata.get("key", field.name): field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            known = ", ".join(fields)
            raise CostTableError(f"{where} has an unknown field {key!r}{nearest(key, fields)}. Known: {known}.")
    given: dict[str, Any] = {}
    for key, field in fields.items():
        if table.get(key) is not None:
            numbers_named = (read for ending, read in _NUMBERS.items() if key.endswith(ending))
            read = readers.get(key) or _READERS.get(str(field.type).removesuffix(" | None")) or next(numbers_named)
            given[field.name] = read(table[key], f"{where}.{key}")
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
            raise CostTableError(f"{where}[{index}] is {name!r}, which is not there{nearest(name, known)}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name that may have been meant, as the end of a sentence; nothing where none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {near[0]!r}" if near else ""


def read_json(path: str | Path, *, what: str) -> Any:
    """Return the content of a JSON file.

    Args:
        what: what the file should be, for errors.
    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON, or has more levels than a plan or a cost table can have.
    """
    too_deep = f"{path} is no {what}: it is nested more than {_MAX_LEVELS} levels deep"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    level = [content]
    for _ in range(_MAX_LEVELS):
        tables = [
            found.values() if isinstance(found, dict) else found for found in level if isinstance(found, (dict, list))
        ]
        level = [each for found in tables for each in found]
    if level:
        raise ValueError(too_deep)
    return content
