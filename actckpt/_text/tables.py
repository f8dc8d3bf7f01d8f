"""Tables of text: rows of cells, aligned in columns."""

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Return lines of cells in columns, the first `left` of them left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
