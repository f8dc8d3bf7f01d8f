"""The graph of one replay as plain numbers: input of the functions that choose order and window."""

import dataclasses
from collections.abc import Mapping

__all__ = ["ReplayGraph"]


@dataclasses.dataclass(frozen=True)
class ReplayGraph:
    """What a replay must compute. Steps and values are numbered."""

    #: Operator names of the steps, for custom orders; in forward order.
    operators: tuple[str, ...]
    #: For each step, the values that it reads, without repeats, and the values that it makes.
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    #: Bytes of each value; 0 for available values.
    nbytes: tuple[int, ...]
    #: The value to compute.
    target: int
    #: Values that stay once they are made: backward needs them again, or steps outside this graph read them.
    retained: frozenset[int]
    #: The retained values, plus values that only these steps read on the way to them: what backward would make again.
    again: frozenset[int] = frozenset()
    #: For values that steps outside this graph read, the step before which the last such read happens.
    until: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def maker(self) -> dict[int, int]:
        """Return the step that makes each unavailable value."""
        return {value: step for step, made in enumerate(self.makes) for value in made}
