"""How often a plan is made again for what steps under it showed."""

from __future__ import annotations

__all__ = ["STEPS_BETWEEN", "Pace"]

STEPS_BETWEEN = 100


class Pace:
    """Lets a plan be made again once in so many steps, whatever the reason."""

    def __init__(self) -> None:
        self._num_to_wait = 0

    def step(self) -> None:
        """A step begins."""
        self._num_to_wait = max(self._num_to_wait - 1, 0)

    @property
    def is_due(self) -> bool:
        """Whether a plan may be made again."""
        return not self._num_to_wait

    def use(self) -> None:
        """A plan is made again: the next one in so many steps."""
        self._num_to_wait = STEPS_BETWEEN
