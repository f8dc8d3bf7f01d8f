"""Looks up private names that not every torch has."""

from typing import Any


def optional(owner: object, name: str) -> Any:
    """Return a name that not every torch has, or None."""
    return getattr(owner, name, None)
