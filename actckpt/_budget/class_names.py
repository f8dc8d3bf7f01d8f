"""Names for the parts of a measured step, by the blocks of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from actckpt._text.listed import calls_named, listed
from actckpt.planner.costs import CostTable

__all__ = ["with_block_names"]


def with_block_names(costs: CostTable, names: Sequence[str | None]) -> CostTable:
    """Return a cost table whose block classes are named after their blocks: `layers.0-5`.

    Args:
        names: of the block, for each entry of the stack; None for segments outside of blocks, which have a name.
    """
    alike: dict[str, list[str]] = {}
    for kind, name in zip(costs.stack, calls_named(names), strict=True):
        if name is not None:
            alike.setdefault(kind, []).append(name)
    new = {kind: listed(block_names) for kind, block_names in alike.items()}
    classes = {new.get(kind, kind): block for kind, block in costs.classes.items()}
    if len(classes) < len(costs.classes):
        return costs  # a block's name looks like a range: two classes would have one name
    return dataclasses.replace(costs, classes=classes, stack=tuple(new.get(kind, kind) for kind in costs.stack))
