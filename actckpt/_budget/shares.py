"""What one forward of a model may use of a budget, in training."""

from __future__ import annotations

import dataclasses
import math

from actckpt._budget.sizes import activation_budget_bytes
from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes

__all__ = ["Bounds", "Part", "Share"]

#: Of the budget beyond what is fixed, this share is left for what is not seen.
_RESERVE = 0.02
#: What an allocator tells differs from run to run. A budget that was told in one is met in the next by a part of that.
_LEAST_RESERVE = 0.01


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bytes that a forward needs at least, and in plain training; or several of them, all together."""

    least: float
    plain: float

    @property
    def between(self) -> float:
        """Plain training needs so many bytes more."""
        return self.plain - self.least

    def times(self, number: int) -> Bounds:
        """Return those of so many forwards."""
        return Bounds(number * self.least, number * self.plain)

    def most(self, other: Bounds) -> Bounds:
        """Return bounds that are as large as both."""
        return Bounds(max(self.least, other.least), max(self.plain, other.plain))


@dataclasses.dataclass(frozen=True)
class Part:
    """What one forward is of those that are alive at once.

    Each gets what it needs at least, and of what is left the same share of what plain training needs beyond that. Of
    less than all of them need each gets a share of what it needs.

    Args:
        num: how many there are, at most.
        are_read_together: one backward reads several of them.
    """

    own: Bounds
    all: Bounds
    num: int
    are_read_together: bool = False

    @classmethod
    def of_alike(cls, num: int) -> Part:
        """Return one of so many, which are alike."""
        return cls(Bounds(0.0, 1.0), Bounds(0.0, float(num)), num)

    @property
    def is_of_alike(self) -> bool:
        """Whether they are."""
        return self.own.times(self.num) == self.all

    def of(self, nbytes: float) -> float:
        """Return what it gets of so many bytes."""
        if nbytes < self.all.least:
            return nbytes * self.own.least / self.all.least
        return self.own.least + (nbytes - self.all.least) * self.own.between / self.all.between

    def whole(self, nbytes: float) -> float:
        """Return of how many bytes it gets so many."""
        if nbytes < self.own.least:
            return nbytes * self.all.least / self.own.least
        return self.all.least + (nbytes - self.own.least) * self.all.between / self.own.between

    def budget_bytes(self, activation_budget: object, *, plain_bytes: float, fixed_bytes: float) -> float:
        """Return the budget for all memory that a budget for activations alone is.

        Args:
            plain_bytes: what one forward needs in plain training, with what is fixed.
            fixed_bytes: that alone.
        """
        all_bytes = self.whole(plain_bytes - fixed_bytes)
        # What waits is there once most of the activations have gone.
        most_bytes = max(all_bytes, plain_bytes)
        nbytes = activation_budget_bytes(activation_budget, plain_bytes=most_bytes)
        return nbytes + (fixed_bytes + all_bytes - most_bytes if nbytes >= most_bytes else 0)  # all of it fits


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of one forward.

    Args:
        given_bytes: the whole budget.
        fixed_bytes: of it, what is there all the time.
        part: what the forward is of those that are alive at once, which have what is not fixed.
        has_reserve: something is left for what is not seen.
        has_least: less of that, since no plan leaves as much.
        given: the budget as it was written, with its keyword.
    """

    given_bytes: float
    fixed_bytes: float
    part: Part
    has_reserve: bool
    given: str = ""
    has_least: bool = False

    @property
    def nbytes(self) -> float:
        """The budget of the forward, with what is fixed."""
        left_bytes = (self.given_bytes - self.fixed_bytes) * self._used
        nbytes = self.fixed_bytes + (self.part.of(left_bytes) if left_bytes > 0 else left_bytes)
        return nbytes if nbytes >= 1.0 else 0.0  # nothing has a part of a byte

    @property
    def _used(self) -> float:
        reserve = _LEAST_RESERVE if self.has_least else _RESERVE
        return 1 - reserve if self.has_reserve else 1.0

    def infeasible(self, error: PlanInfeasibleError) -> PlanInfeasibleError:
        """Return an error about the share of a forward as one about the whole budget."""
        if error.smallest_bytes is None:
            return error
        left_bytes = self.part.whole(error.smallest_bytes - self.fixed_bytes) / self._used
        smallest_bytes = math.ceil(self.fixed_bytes + left_bytes) + 1
        needed = f"{format_bytes(error.smallest_bytes)} for the forward that is planned"
        if self.part.num > 1 and self.part.is_of_alike:
            needed += f", of which {self.part.num} were alive at once"
        elif self.part.num > 1:
            needed += f", which was alive together with others of other sizes, {self.part.num} in all"
        given, smallest = format_bytes(self.given_bytes), format_bytes(smallest_bytes)
        written = f" ({self.given})" if self.given else ""
        return PlanInfeasibleError(
            f"No plan fits into {given}{written}: the smallest budget is {smallest} ({smallest_bytes} bytes): "
            f"{needed}, and {_RESERVE:.0%} for what is not seen. {error.holds}. Pass that budget or a larger one, or "
            "make the batch smaller.",
            smallest_bytes,
            error.holds,
        )
