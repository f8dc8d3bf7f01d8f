"""The warnings and errors of training with a budget."""

from __future__ import annotations

from actckpt._budget.budget_config import OnInfeasible
from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes

__all__ = [
    "CAPTURED",
    "CHECKPOINTED",
    "COMPILED",
    "GROWS",
    "MANY_SIZES",
    "NO_OUTPUTS",
    "RAN_OUT",
    "TWO_THREADS",
    "UNREAD",
    "Infeasible",
]

COMPILED = WarningText(
    "apply: no plan for the budget is made: all blocks run inside one compiled function, or none runs with gradients "
    "(in a reentrant checkpoint they do only in backward). They stay checkpointed until one runs with gradients "
    "outside of compiled code.",
    "Compile the blocks instead of the model (block.compile() for each one), or pass a policy in place of the budget. "
    "Or leave apply out and give the compiler a share: torch._functorch.config.activation_memory_budget = 0.5.",
    per="model",
)
CAPTURED = (
    "apply: a model with a budget was called while its stream is captured into a CUDA graph, where no step can be "
    "measured. Capture a plan: plan = actckpt.report(model).plan after the first steps, actckpt.remove(model), "
    "actckpt.apply(model, policy=plan)."
)
CHECKPOINTED = (
    "apply: a model with a budget was called inside a checkpoint, which runs it again in backward: the budget cannot "
    "tell a step from a rerun. Leave out that checkpoint, since the budget decides what is recomputed; or pass a plan "
    "that was made outside, apply(model, policy=plan)."
)
GROWS = WarningText(
    "apply: sizes inside of a {model} with a budget grow: too many of its steps were measured. Steps that are larger "
    "than the plan recompute everything.",
    "Give {model} arguments whose shapes show these sizes, or let the largest step be among the first.",
    per="model",
)
MANY_SIZES = WarningText(
    "apply: a {model} with a budget was called with too many sizes, and no size with a plan is as large in each "
    "dimension as this one. Sizes without a plan recompute everything.",
    "Pad inputs to fewer sizes, or let the largest be among the first.",
    per="model",
)
NO_OUTPUTS = WarningText(
    "apply: no plan for the budget is made for a {model} whose blocks ran with gradients, because it returned no "
    "tensor with a graph: the end of its step is unknown. Its blocks stay checkpointed until it returns one.",
    "If {model} calls backward itself, or returns an object that is no tuple, list, mapping or dataclass, give apply "
    "the part of it that returns what backward begins with. Or pass a policy in place of the budget.",
    per="model",
)
RAN_OUT = WarningText(
    "apply: the forward of block {block!r} of a {model} ran out of memory, although the plan fits into the budget. It "
    "ran once more, checkpointed, with the random numbers and buffers of the first attempt. Results are the same, but "
    "Python code of the block ran twice. The next steps run a plan with less memory.",
    "Pass a smaller budget, or call actckpt.configure(rescue=False) to get the error.",
    per="model",
)
TWO_THREADS = (
    "apply: the model was called in two threads at once, and one of them measures its blocks. Run one step before "
    "other threads begin."
)
UNREAD = WarningText(
    "apply: {forwards} forwards in a row of a {model} with a budget ran with gradients, and no backward reached what "
    "they returned. Without a backward no plan is made, and the saved tensors are useless.",
    "Run evaluation and generation under torch.no_grad(); in training call backward on a loss of what the model "
    "returns.",
    per="model",
)
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
