"""Files and fields of a plan: what cannot be one is refused, with the reason."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["checked_facts", "checked_flags", "checked_names", "checked_number", "checked_text", "read_json"]

#: Plans and cost tables have fewer than 10 levels.
_MAX_LEVELS = 100


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
        level = [each for found in level if isinstance(found, (dict, list)) for each in _entries(found)]
    if level:
        raise ValueError(too_deep)
    return content


def _entries(found: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return found.values() if isinstance(found, dict) else found


def checked_number(found: object) -> float:
    """Return a number of bytes or seconds; a budget may be infinite."""
    if not isinstance(found, numbers.Real) or isinstance(found, bool):
        raise ValueError(f"{found!r} is no number.")
    if math.isnan(found) or found < 0:
        raise ValueError(f"{found!r} is no number from 0 on.")
    return found  # type: ignore[return-value]


def checked_text(found: object) -> str:
    """Return a text."""
    if not isinstance(found, str):
        raise ValueError(f"{found!r} is no text.")
    return found


def checked_flags(found: Any) -> tuple[bool, ...]:
    """Return a list of true or false."""
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, bool) for each in found):
        raise ValueError(f"{found!r} is no list of true and false.")
    return tuple(found)


def checked_names(found: Any) -> tuple[str | None, ...] | None:
    """Return a list of names, of which some may be left out; None: there is none."""
    if found is None:
        return None
    if not isinstance(found, (list, tuple)) or not all(each is None or isinstance(each, str) for each in found):
        raise ValueError(f"{found!r} is no list of names.")
    return tuple(found)


def checked_facts(found: Any) -> Mapping[str, Any] | None:
    """Return what a plan says of its model; None: it knows none."""
    if found is None:
        return None
    known = dict(found)
    for name in ("type", "torch"):
        checked_text(known.get(name))
    for kinds in dict(known.get("blocks") or {}).values():
        if not kinds or None in (checked_names(kinds) or (None,)):
            raise ValueError(f"{kinds!r} are no types of a block.")
    for parameter, described in dict(known.get("parameters") or {}).items():
        shape, dtype, is_trained = described
        if shape is not None and not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{shape!r} is no shape of {parameter!r}.")
        checked_text(dtype)
        checked_flags([is_trained])
    return {"blocks": {}, "parameters": {}, **known}
