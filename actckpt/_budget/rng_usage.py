"""Random numbers that a block draws from generators that its rerun would not restore."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import numpy
import torch

from actckpt import _C
from actckpt._core.random_state import known_trackers, numpy_random, python_random

__all__ = ["RngUsage"]


class RngUsage:
    """Detects draws from Python's and NumPy's global generators, and from generators passed to operators."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()

    def unrestored(self, block: torch.nn.Module, generators: Iterable[torch.Generator]) -> str | None:
        """Return a description of the generators that a block drew from and no rerun restores; None if there are none.

        Args:
            generators: those passed to operators of the block.
        """
        restored = set(map(type, known_trackers(())))
        sources = []
        if type(python_random()) not in restored and random.getstate() != self._python:
            sources.append("random")
        pairs = zip(numpy.random.get_state(), self._numpy, strict=True)
        if type(numpy_random()) not in restored and not all(numpy.array_equal(*pair) for pair in pairs):
            sources.append("numpy.random")
        known = (torch.default_generator, *_C.Parameters(block).generators)
        if not all(_is_among(known, generator) for generator in generators):
            sources.append("a generator that is in no attribute of a module")
        return f"it draws from {' and '.join(sources)}, which a rerun would go on with" if sources else None


def _is_among(known: Sequence[torch.Generator], generator: torch.Generator) -> bool:
    """Return whether a generator is one of these: operators get other Python objects for the same one."""
    others = [candidate for candidate in known if candidate.device == generator.device]
    seeds = {candidate.initial_seed() for candidate in others}
    state, seed = generator.get_state(), next(number for number in itertools.count() if number not in seeds)
    generator.manual_seed(seed)
    try:
        return any(candidate.initial_seed() == seed for candidate in others)
    finally:
        generator.set_state(state)
