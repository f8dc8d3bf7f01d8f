"""What `apply` does if no plan fits into the budget."""

from __future__ import annotations

from typing import Literal, get_args

from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes
from actckpt._text.suggestions import did_you_mean

__all__ = ["Infeasible", "OnInfeasible", "check_on_infeasible"]

OnInfeasible = Literal["warn", "raise"]

#: Warn again if a step needs this many times what the last warning said.
_WARN_AGAIN = 1.05
_PER = "model, and again for a larger smallest budget"
_RUNS_LEAST = WarningText(
    "apply: {why_no_plan_fits} Until then the plan with the smallest peak runs, which exceeds the budget.",
    "Pass on_infeasible='raise' to get an error instead.",
    per=_PER,
)
_LATE = WarningText(
    "apply: steps need more memory than was known when their plan was made, or less of it is free, and no plan fits "
    "any more. From now on the plan with the smallest peak runs, which exceeds the budget. {why_no_plan_fits}",
    "Let the largest step be among the first.",
    per=_PER,
)

_EXCEEDS = WarningText(
    "apply: steps of a {model} with {budget} needed up to {peak}, although their plan was corrected several times. A "
    "plan does not count what else allocates on the device (another thread, another model), or what differs from step "
    "to step.",
    "Pass a smaller budget if that memory is not there.",
    per="model, and again for a larger peak",
)


def check_on_infeasible(value: object, what: str) -> None:
    """Raise a ValueError if `on_infeasible` has an unknown value."""
    if value not in get_args(OnInfeasible):
        near = did_you_mean([str(value)], get_args(OnInfeasible), show=repr)
        raise ValueError(f"{what}: on_infeasible={value!r}. Pass 'warn' or 'raise'.{near}")


class Infeasible:
    """What one model's budget does if no plan fits: an error, unless steps of a plan have run, or warnings."""

    def __init__(self, on_infeasible: OnInfeasible) -> None:
        self.raises = on_infeasible == "raise"
        self._warned_bytes = self._warned_peak_bytes = 0.0

    def warn(self, error: PlanInfeasibleError, *, is_late: bool) -> None:
        """Warn at the model's call, unless an earlier warning named a budget at least as large."""
        smallest_bytes = error.smallest_bytes or 0.0
        if smallest_bytes > _WARN_AGAIN * self._warned_bytes:
            self._warned_bytes = smallest_bytes
            warn_user(_LATE if is_late else _RUNS_LEAST, why_no_plan_fits=error)

    def warn_of_excess(self, model: str, budget: str, peak_bytes: float) -> None:
        """Warn that steps exceed the budget, unless an earlier warning named a peak at least as large."""
        if peak_bytes > _WARN_AGAIN * self._warned_peak_bytes:
            self._warned_peak_bytes = peak_bytes
            warn_user(_EXCEEDS, model=model, budget=budget, peak=format_bytes(peak_bytes))
