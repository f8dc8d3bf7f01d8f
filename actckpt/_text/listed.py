"""Short texts for several names: numbered ones are combined."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

__all__ = ["calls_named", "listed", "without_call"]

_CALL = re.compile(r"@[1-9]\d*(?=\)?$)")
_NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>0|[1-9]\d*)(?P<tail>\D*)", re.DOTALL)


def listed(names: Iterable[str]) -> str:
    """Return names as text; consecutive numbers become a range, and a common prefix is written once.

    Example::

        >>> from actckpt._text.listed import listed
        >>> listed(["layers.0", "layers.1", "layers.2", "layers.4", "norm"])
        'layers.0-2, 4, norm'
    """
    rows: list[tuple[str, str, list[int]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        head, tail, numbers = (
            (name, "", []) if match is None else (match["head"], match["tail"], [int(match["number"])])
        )
        if rows and numbers and rows[-1][:2] == (head, tail) and rows[-1][2][-1] == numbers[0] - 1:
            rows[-1][2].extend(numbers)
        else:
            rows.append((head, tail, numbers))
    parts: list[str] = []
    for place, (head, tail, numbers) in enumerate(rows):
        goes_on = place > 0 and bool(numbers) and not tail and rows[place - 1][:2] == (head, tail)
        range_ = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        parts.append(f"{'' if goes_on else head}{range_}{tail}")
    return ", ".join(parts)


def calls_named(blocks: Sequence[str | None]) -> list[str | None]:
    """Return the names of blocks in the order of their calls; repeated calls get their number.

    Example::

        >>> from actckpt._text.listed import calls_named
        >>> calls_named([None, "block", "block"])
        [None, 'block', 'block@1']
    """
    calls: Counter[str] = Counter()
    names: list[str | None] = []
    for name in blocks:
        names.append(f"{name}@{calls[name]}" if name is not None and calls[name] else name)
        if name is not None:
            calls[name] += 1
    return names


def without_call(name: str) -> str:
    """Return a name without the call number that `calls_named` adds.

    Example::

        >>> from actckpt._text.listed import without_call
        >>> without_call("block@1"), without_call("(before block@1)")
        ('block', '(before block)')
    """
    return _CALL.sub("", name)
