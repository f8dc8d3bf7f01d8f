"""Sizes in bytes and times, parsed from text and formatted for people. Imports no torch."""

import math
import numbers
import re

__all__ = ["format_bytes", "format_seconds", "number_in", "parse_bytes", "unit_of"]

_PREFIXES = "KMGT"
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}IB": 2 ** (10 * power) for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate(_PREFIXES, start=1)},
}
_MAX_BYTES = 2**62
_FORMS = "bytes as a whole number, or a text like '64GiB' or '500MB'"


def parse_bytes(size: object, *, what: str, forms: str = _FORMS) -> int:
    """Return a size in bytes.

    Args:
        size: a whole number of bytes (also as a float: 4e9), or a text like `"64GiB"`, `"1.5 GB"`, `"4096"`; units may
            be
            lowercase.
        what: the call and its name, for the error.
        forms: what may be passed, for the error.
    Raises:
        ValueError: it is not a size; suggests the one that may have been meant.
    """
    nbytes = _bytes_in(size)
    if nbytes is None:
        raise ValueError(f"{what}={size!r} is not a size. Pass {forms}.{_meant(size)}")
    return nbytes


def _bytes_in(size: object) -> int | None:
    """Return the bytes of a size; None if it is not a size."""
    nbytes = -1
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS and not _is_bits(match[2]):
            nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    elif (isinstance(size, numbers.Integral) and not isinstance(size, bool)) or (
        isinstance(size, float) and size.is_integer()
    ):
        nbytes = int(size)
    return nbytes if 0 <= nbytes <= _MAX_BYTES else None


def _is_bits(unit: str) -> bool:
    """Whether a unit means bits as people write them: Gb, Mib. All-lowercase units mean bytes."""
    return unit[:1] in _PREFIXES and unit[-1:] == "b"


def number_in(text: str) -> float | None:
    """Return the finite number >= 0 in a text, also with a decimal comma or `_`; None if it has none."""
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


def _meant(size: object) -> str:
    """Return the size that a text may have meant; empty if unknown."""
    match = re.fullmatch(r"\s*(.*\d)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    number = None if match is None else number_in(match[1])
    if match is None or number is None:
        return ""
    unit = match[2]
    units = [f"{prefix}{end}" for prefix in _PREFIXES if unit[:1].upper() == prefix for end in ("iB", "B")]
    units = [unit] if unit.upper() in _UNITS and not _is_bits(unit) else units
    sizes = [text for candidate in units if _bytes_in(text := f"{number:.15g}{candidate}")]
    bits = f" {unit!r} are bits." if units and _is_bits(unit) else ""
    return f"{bits} Did you mean {' or '.join(map(repr, sizes))}?" if sizes else bits


def format_bytes(nbytes: float) -> str:
    """Return a size for people: `"1.50 GiB"`, `"20 B"`."""
    unit, size = unit_of(nbytes)
    return f"{nbytes:g} B" if size == 1 else f"{nbytes / size:.2f} {unit}"


def unit_of(nbytes: float) -> tuple[str, int]:
    """Return the unit for a size, and its bytes: `("GiB", 2**30)`, `("B", 1)`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return unit, size
    return "B", 1


def format_seconds(seconds: float) -> str:
    """Return a time for people: `"1.50 s"`, `"20.00 ms"`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us" if seconds else "0 s"
