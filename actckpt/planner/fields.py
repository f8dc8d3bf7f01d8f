"""Plain data read field by field, with errors that name the field."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from actckpt._error_base import CostTableError

__all__ = ["Fields", "nearest"]

#: More than any machine has, so a sign of a wrong unit.
_MOST_BYTES = 2**50
_MOST_SECONDS = 24 * 3600
_MOST_BYTES_PER_S = 2**63
#: For limits, where a number too large does no harm.
_MOST_LIMIT_BYTES = 2**63


class Fields:
    """A table (a JSON object) of which fields are read one by one.

    Args:
        table: what was read, checked to be a table.
        where: its name in errors.
    """

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            raise CostTableError(f"{where} is a {type(table).__name__}. It must be a table of named fields.")
        self.where = where
        self._table = table
        self._read: list[str] = []

    def _get(self, name: str, default: Any = None) -> Any:
        """Return a field; None as default: it must be there."""
        self._read.append(name)
        if name in self._table:
            return self._table[name]
        if default is not None:
            return default
        near = nearest(name, [key for key in self._table if key not in self._read])
        raise CostTableError(f"{self.where} has no field {name!r}{near}. It must have one; see docs/planning.md.")

    def nothing_else(self) -> None:
        """Raise where the table has a field that was not asked for."""
        for key in self._table:
            if key not in self._read:
                near = nearest(key, self._read)
                known = ", ".join(self._read)
                raise CostTableError(f"{self.where} has an unknown field {key!r}{near}. Known: {known}.")

    def version(self, known: int) -> None:
        """Check the field `version`."""
        found = self._get("version")
        if found != known or isinstance(found, bool):
            raise CostTableError(f"{self.where}.version is {found!r}. This actckpt reads version {known}.")

    def text(self, name: str) -> str:
        """Return a text that is not empty."""
        found = self._get(name)
        if not isinstance(found, str) or not found:
            raise CostTableError(f"{self.where}.{name} is {found!r}. It must be a text that is not empty.")
        return found

    def optional_text(self, name: str) -> str | None:
        """Return a text that is not empty, None where the field is left out."""
        if self._table.get(name) is None:
            self._read.append(name)
            return None
        return self.text(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        found = self._get(name, default)
        if not isinstance(found, bool):
            raise CostTableError(f"{self.where}.{name} is {found!r}. It must be true or false.")
        return found

    def size(self, name: str, default: float | None = None) -> float:
        """Return bytes; None as default: it must be there."""
        return _number(self._get(name, default), f"{self.where}.{name}", "bytes", _MOST_BYTES)

    def seconds(self, name: str, default: float | None = None) -> float:
        """Return seconds; None as default: it must be there."""
        return _number(self._get(name, default), f"{self.where}.{name}", "seconds", _MOST_SECONDS)

    def optional_seconds(self, name: str) -> float | None:
        """Return seconds, None where the field is left out."""
        if self._table.get(name) is None:
            self._read.append(name)
            return None
        return self.seconds(name)

    def rate(self, name: str) -> float:
        """Return bytes per second, 0 where there are none: no link."""
        return _number(self._get(name, 0), f"{self.where}.{name}", "bytes per second", _MOST_BYTES_PER_S)

    def limit(self, name: str) -> float | None:
        """Return a limit in bytes, None where there is none."""
        if self._table.get(name) is None:
            self._read.append(name)
            return None
        return _number(self._get(name), f"{self.where}.{name}", "bytes", _MOST_LIMIT_BYTES)

    def difference(self, name: str, *, optional: bool = False) -> Any:
        """Return bytes, which may be below zero; None where the field is left out and may be."""
        if optional and self._table.get(name) is None:
            self._read.append(name)
            return None
        found = self._get(name)
        is_below = isinstance(found, numbers.Real) and not isinstance(found, bool) and found < 0
        nbytes = _number(-found if is_below else found, f"{self.where}.{name}", "bytes", _MOST_BYTES)
        return -nbytes if is_below else nbytes

    def entry(self, name: str, num: int) -> int:
        """Return a number of an entry of the stack, -1 where the field is left out."""
        return self._entry(self._get(name, -1), name, -1, num)

    def entries(self, name: str, num: int) -> tuple[int, ...]:
        """Return numbers of entries of the stack."""
        return tuple(self._entry(each, name, 0, num) for each in self._list(name, ()))

    def _entry(self, found: object, name: str, least: int, num: int) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found < num:
            raise CostTableError(f"{self.where}.{name} has {found!r}. It must be a number from {least} to {num - 1}.")
        return found

    def names(self, name: str, default: Any = None, *, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return a list of names, each one of `among`; None as default: it must be there."""
        found = self._list(name, default)
        if not all(isinstance(each, str) for each in found):
            raise CostTableError(f"{self.where}.{name} is {found!r}. It must be a list of names.")
        if among is not None:
            self.check_names(found, among, f"{self.where}.{name}")
        return tuple(found)

    @staticmethod
    def check_names(names: Iterable[str], among: Iterable[str], where: str) -> None:
        """Raise where one of the names is not among those known."""
        known = list(among)
        for index, name in enumerate(names):
            if name not in known:
                near = nearest(name, known)
                raise CostTableError(f"{where}[{index}] is {name!r}, which is not there{near}.")

    def tables(self, name: str) -> list[Fields]:
        """Return a list of tables, none where the field is left out."""
        return [Fields(each, f"{self.where}.{name}[{index}]") for index, each in enumerate(self._list(name, ()))]

    def table(self, name: str) -> Fields | None:
        """Return a table, None where there is none."""
        if self._table.get(name) is None:
            self._read.append(name)
            return None
        return Fields(self._get(name), f"{self.where}.{name}")

    def named_tables(self, name: str) -> dict[str, Fields]:
        """Return tables by name."""
        found = Fields(self._get(name), f"{self.where}.{name}")._table
        return {key: Fields(each, f"{self.where}.{name}.{key}") for key, each in found.items()}

    def _list(self, name: str, default: Any = None) -> Any:
        found = self._get(name, default)
        if not isinstance(found, list | tuple):
            raise CostTableError(f"{self.where}.{name} is {found!r}. It must be a list.")
        return found


def _number(found: object, where: str, unit: str, most: float) -> float:
    if not isinstance(found, numbers.Real) or isinstance(found, bool):
        raise CostTableError(f"{where} is {found!r}. It must be a number of {unit}.")
    number = int(found) if isinstance(found, numbers.Integral) else float(found)
    if not number >= 0:
        raise CostTableError(f"{where} is {number}. It must be a number of {unit} from 0 on.")
    if number > most:
        raise CostTableError(f"{where} is {number}, more than {most:.3g} {unit}. Is it in {unit}?")
    return number


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name that may have been meant, as the end of a sentence; nothing where none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {near[0]!r}" if near and near[0] != name else ""
