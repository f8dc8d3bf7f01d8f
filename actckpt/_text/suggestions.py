"""Suggestions for unknown names."""

import difflib
from collections.abc import Callable, Iterable, Sequence

__all__ = ["did_you_mean"]


def did_you_mean(
    names: Iterable[str], known: Sequence[str], *, cutoff: float = 0.6, show: Callable[[str], str] = str
) -> str:
    """Return a sentence with the known name nearest to each of `names`, after a space; empty if none is near.

    Args:
        cutoff: minimum similarity, in (0, 1].
        show: formats a known name for the sentence.

    Example::

        >>> from actckpt._text.suggestions import did_you_mean
        >>> did_you_mean(["polcy"], ["policy", "blocks"])
        ' Did you mean policy?'
    """
    near = [match for name in names for match in difflib.get_close_matches(name, known, n=1, cutoff=cutoff)]
    return f" Did you mean {', '.join(map(show, dict.fromkeys(near)))}?" if near else ""
