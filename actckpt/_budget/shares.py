"""What one forward of a model may use of a budget, in training."""

from __future__ import annotations

import dataclasses
import math

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes

__all__ = ["Share"]

#: Of the budget beyond what is fixed, this share is left for what is not seen.
_RESERVE = 0.02


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of one forward.

    Args:
        given_bytes: the whole budget.
        fixed_bytes: of it, what is there all the time.
        num_alive: how many forwards are alive at once; each gets as much of what is not fixed.
        has_reserve: something is left for what is not seen.
        given: the budget as it was written, with its keyword.
    """

    given_bytes: float
    fixed_bytes: float
    num_alive: int
    has_reserve: bool
    given: str = ""

    @property
    def nbytes(self) -> float:
        """The budget of the forward, with what is fixed."""
        nbytes = self.fixed_bytes + (self.given_bytes - self.fixed_bytes) * self._factor
        return nbytes if nbytes >= 1.0 else 0.0  # nothing has a part of a byte

    @property
    def _factor(self) -> float:
        return (1 - _RESERVE if self.has_reserve else 1.0) / max(self.num_alive, 1)

    def infeasible(self, error: PlanInfeasibleError) -> PlanInfeasibleError:
        """Return an error about the share of a forward as one about the whole budget."""
        if error.smallest_bytes is None:
            return error
        smallest_bytes = math.ceil(self.fixed_bytes + (error.smallest_bytes - self.fixed_bytes) / self._factor) + 1
        needed = f"{format_bytes(error.smallest_bytes)} for the forward that is planned"
        if self.num_alive > 1:
            needed += f", of which {self.num_alive} were alive at once"
        given, smallest = format_bytes(self.given_bytes), format_bytes(smallest_bytes)
        written = f" ({self.given})" if self.given else ""
        return PlanInfeasibleError(
            f"No plan fits into {given}{written}: the smallest budget is {smallest} ({smallest_bytes} bytes): "
            f"{needed}, and {_RESERVE:.0%} for what is not seen. {error.holds}. Pass that budget or a larger one, or "
            "make the batch smaller.",
            smallest_bytes,
            error.holds,
        )
