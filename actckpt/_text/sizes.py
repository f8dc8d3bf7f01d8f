"""Sizes in bytes and times: read from text, and written for people. Does not import torch."""

import re

__all__ = ["format_bytes", "format_seconds", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MAX_BYTES = 2**62


def parse_bytes(size: object, *, what: str) -> int:
    """Return a size in bytes.

    Args:
        size: a whole number of bytes, or a text like `"64GiB"`, `"1.5 GB"`, `"4096"`.
        what: the call and its name, for the error.
    Raises:
        ValueError: it is not a size.
    """
    nbytes = size if isinstance(size, int) and not isinstance(size, bool) else -1
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if 0 <= nbytes <= _MAX_BYTES:
        return nbytes
    raise ValueError(f"{what}={size!r} is not a size. Pass bytes as a whole number, or a text like '64GiB' or '500MB'.")


def format_bytes(nbytes: float) -> str:
    """Return a size for people: `"1.50 GiB"`, `"20 B"`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:g} B"


def format_seconds(seconds: float) -> str:
    """Return a time for people: `"1.50 s"`, `"20.00 ms"`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us" if seconds else "0 s"
