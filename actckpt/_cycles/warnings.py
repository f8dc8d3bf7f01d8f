"""The warnings and errors of training with a budget."""

from __future__ import annotations

from actckpt._core import torch_private
from actckpt._core.sites import warn_user

__all__ = [
    "CHECKPOINTED",
    "COMPILED",
    "EXCEEDS",
    "GROWS",
    "MANY_SIZES",
    "NO_OUTPUTS",
    "TWO_THREADS",
    "UNREAD",
    "warn_compiled",
]

COMPILED = (
    "apply: no plan for the budget is made where all blocks run inside one compiled function, or none runs with "
    "gradients (in a reentrant checkpoint they do in backward alone): they cannot be measured there, and stay "
    "checkpointed until one runs with gradients, and not in there. Compile the blocks instead of the model "
    "(block.compile() for each one), pass a policy in place of the budget, or leave apply out and give the "
    "compiler a share: torch._functorch.config.activation_memory_budget = 0.5."
)
CHECKPOINTED = (
    "apply: a model with a budget was called inside of a checkpoint, which runs it again in backward: what a step is "
    "cannot be told then. Leave out that checkpoint, since the budget says what is recomputed; or pass a plan that is "
    "made already, apply(model, policy=plan), which works inside of one."
)
EXCEEDS = (
    "apply: steps of a {} with {} needed up to {}, although their plan was corrected several times. What else "
    "allocates on the device (another thread, another model), or differs from step to step, is not part of a plan. "
    "Pass a smaller budget if that memory is not there. Shown once."
)
GROWS = (
    "apply: sizes inside of a {0} with a budget grow, and too many of its steps were measured, or waited for one as "
    "large as the largest. Steps that are larger than the plan go on to recompute everything, within the budget where "
    "that fits. Give {0} what shows its sizes (shapes of its arguments), or let the largest step be among the first. "
    "Shown once."
)
MANY_SIZES = (
    "apply: a {} with a budget was called with too many sizes, and none that has a plan is as large in each dimension "
    "as this one. What has no plan recomputes everything. Pad inputs to fewer sizes, or let the largest be among "
    "the first. Shown once."
)
NO_OUTPUTS = (
    "apply: no plan for the budget is made for a {0} whose blocks ran with gradients, and that returned no tensor with "
    "a graph: where its step ends cannot be told. Its blocks stay checkpointed until it returns one. Does it call "
    "backward itself, or return an object that is no tuple, list, mapping or dataclass? Give apply the part of {0} "
    "that returns what backward begins with, or pass a policy in place of the budget. Shown once."
)
TWO_THREADS = (
    "apply: the model was called in two threads at once, and one of them measures its blocks. Run one step before "
    "other threads begin."
)
UNREAD = (
    "apply: {} forwards in a row of a {} with a budget ran with gradients, and no backward followed that came to what "
    "they returned. Without one no plan is made, and what they save is for nothing. Run evaluation and generation "
    "under torch.no_grad(); in training call backward on a loss of what the model returns. Shown once."
)


@torch_private.called_while_traced
def warn_compiled() -> bool:
    """Warn that compiled code runs, which cannot be measured."""
    warn_user(COMPILED)
    return True
