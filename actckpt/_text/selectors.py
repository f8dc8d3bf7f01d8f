"""Patterns for dotted names: of modules (`layers.0.mlp`) and of operators (`aten.mul.Tensor`).

The only matcher of names: `apply(blocks=)`, `te.wrap`, `configure(opaque=)` and tables of places use it. Selectors of
values, which have both kinds of names, are in `places`.
"""

import functools
import re

__all__ = ["is_pattern", "matches"]

#: Parts of a pattern, in the order of the search, and their regular expressions.
_PARTS = {
    r"\*\*\.": r"(?:.*\.)?",
    r"\*\*": r".*",
    r"\*": r"[^.]*",
    r"\?": r"[^.]",
}
_TOKEN = re.compile("|".join([*_PARTS, r"\[[^\]]+\]", "."]), re.DOTALL)


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards."""
    return any(wildcard in name for wildcard in "*?[")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name.

    `*` and `?` stop at dots, `**` crosses them, and `**.` may be empty: `layers.*` is each layer without what is
    inside, `layers.**` also everything inside, `**.mlp` every `mlp`. `[ab]` is one of these characters, `[!ab]` any
    other one.

    Raises:
        ValueError: the brackets contain an invalid set, such as `[b-a]`.

    Example::

        >>> from actckpt._text.selectors import matches
        >>> [matches(pattern, "layers.0.mlp") for pattern in ("layers.*", "layers.*.mlp", "layers.**", "**.mlp")]
        [False, True, True, True]
    """
    return _compiled(pattern).fullmatch(name) is not None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile("".join(_expression(token) for token in _TOKEN.findall(pattern)), re.DOTALL)
    except re.error as error:
        raise ValueError(f"The pattern {pattern!r} is none: {error}. Between brackets: characters, or a-z.") from None


def _expression(token: str) -> str:
    for part, expression in _PARTS.items():
        if re.fullmatch(part, token):
            return expression
    if len(token) > 1:  # a set of characters
        is_negated = token[1] in "!^" and len(token) > 3
        characters = re.escape(token[2:-1] if is_negated else token[1:-1])
        characters = re.sub(r"(?<!-)\\-(?!\\-)", "-", characters)  # one hyphen makes a range, several are literal
        return f"[{'^.' if is_negated else ''}{characters}]"
    return re.escape(token)
