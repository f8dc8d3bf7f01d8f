"""`actckpt.te.checkpoint`: a drop-in for `transformer_engine.pytorch.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import noop_context_fn

from actckpt._checkpointed_call import checkpoint_call
from actckpt._error_base import ActckptDeprecationWarning
from actckpt._interface import GetTracker, WarningText, disable_dynamo, is_capturing, warn_once
from actckpt._options import CheckpointOptions, ContextFn
from actckpt.te import registration
from actckpt.te.split import SplitInput

__all__ = ["checkpoint"]

_Result = TypeVar("_Result")

_POSITIONAL = WarningText(
    "te.checkpoint: distribute_saved_activations, get_rng_state_tracker and tp_group as positional arguments are "
    "deprecated by TransformerEngine.",
    "Pass them by name.",
    per="process",
    category=ActckptDeprecationWarning,
)
_REENTRANT = WarningText(
    "te.checkpoint: use_reentrant=True is ignored; actckpt has the non-reentrant variant only, which does all that the "
    "reentrant one does.",
    "Leave the keyword out.",
    per="process",
)


@disable_dynamo
def checkpoint(
    function: Callable[..., _Result],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: GetTracker | None = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> _Result:
    """Run `function` without keeping what it saves for backward; backward runs it again.

    Drop-in for `transformer_engine.pytorch.checkpoint`; docs/te-differences.md lists the differences. Without
    TransformerEngine it behaves like `actckpt.checkpoint`.

    Args:
        function: a module or function; called with the other arguments, now and again in backward.
        distribute_saved_activations: keep only this rank's share of the first argument, a tensor, between forward and
            backward; the ranks of `tp_group` gather it for the rerun. Not supported inside another region or `offload`,
            which hold the inputs themselves. Every rank must then run backward through the region.
        get_rng_state_tracker: returns the random state tracker that reruns restore. TransformerEngine's own current
            tracker is restored without it.
        tp_group: process group of `distribute_saved_activations`; None: all ranks.
        use_reentrant: accepted and ignored; True warns once. Nothing here is reentrant.
        context_fn: as in `actckpt.checkpoint`, as are determinism_check and debug.
    Returns:
        The result of `function`.
    Raises:
        ValueError: `distribute_saved_activations` without a tensor as first argument, or without process groups.
        TransformerEngineError: this TransformerEngine has unknown internals.
    Cost: one more forward of `function` in backward; one gather per rerun if the input was split.
    """
    if _is_legacy(args):
        warn_once(_POSITIONAL)
        (distribute_saved_activations, get_rng_state_tracker, tp_group), args = args[:3], args[3:]
    if use_reentrant:
        warn_once(_REENTRANT)
    if not torch.is_grad_enabled():
        forward_context, _ = context_fn()
        with forward_context:
            return function(*args, **kwargs)
    if is_capturing():  # random states cannot be read: the graph keeps what it saves
        return function(*args, **kwargs)
    registration.leave_fsdp_group(function)
    options = CheckpointOptions(
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        rng_trackers=() if get_rng_state_tracker is None else (get_rng_state_tracker,),
    )
    split = SplitInput(args, tp_group) if distribute_saved_activations else None
    result: _Result = checkpoint_call(
        function, args, kwargs, options, input_hooks=None if split is None else split.hooks
    )
    return result


def _is_legacy(args: tuple[Any, ...]) -> bool:
    """Whether these are the positional arguments of old versions: bool, tracker, group, then the function's own."""
    if len(args) <= 3 or not isinstance(args[0], bool) or not callable(args[1]):
        return False
    return args[2] is None or isinstance(args[2], torch.distributed.ProcessGroup)
