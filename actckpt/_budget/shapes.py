"""What a model is called with, as far as plans depend on it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

__all__ = ["Shapes"]


class Shapes(NamedTuple):
    """What the model is called with, as far as a plan depends on it."""

    #: All that is no shape.
    kind: tuple[Any, ...]
    #: A jagged dimension is 1: how much there is of it is a size inside (NOTE [ Sizes inside of a model ]).
    shapes: tuple[tuple[int, ...], ...]

    def holds(self, other: Shapes) -> bool:
        """Return whether the other ones are in no dimension larger."""
        if self.kind != other.kind or [*map(len, self.shapes)] != [*map(len, other.shapes)]:
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(more >= less for ours, theirs in pairs for more, less in zip(ours, theirs, strict=True))

    @property
    def num_elements(self) -> int:
        """How many elements all tensors have."""
        return sum(map(math.prod, self.shapes))
