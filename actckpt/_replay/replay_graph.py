"""The graph of one replay, in plain numbers: what orders and windows are chosen by."""

import dataclasses
from collections.abc import Mapping

__all__ = ["ReplayGraph"]


@dataclasses.dataclass(frozen=True)
class ReplayGraph:
    """What a replay must compute. Steps and values are numbers."""

    #: Names of the operators of the steps, for orders that look at them. In the order of the forward.
    operators: tuple[str, ...]
    #: For each step, the values that it reads, each once, and the values that it makes.
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    #: Bytes of each value; 0 for values that are available.
    nbytes: tuple[int, ...]
    #: The value that is asked for.
    target: int
    #: Values that stay once they are made, since backward asks for them too, or others than these steps read them.
    retained: frozenset[int]
    #: These, and those that only these steps read on the way to them: all that backward would have to make again.
    again: frozenset[int] = frozenset()
    #: For values that others read, the step before which they do so last.
    until: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def maker(self) -> dict[int, int]:
        """Return the step that makes each value that is not available."""
        return {value: step for step, made in enumerate(self.makes) for value in made}
