"""`checkpoint` under torch.compile: torch's own, which the compiler knows as one operator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from actckpt.runtime import rng

__all__ = ["TORCH_PARAMETERS", "compiled_checkpoint"]

#: Of the installed torch's checkpoint.
TORCH_PARAMETERS = inspect.signature(torch_checkpoint.checkpoint).parameters


def compiled_checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool | None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    determinism_check: str,
    debug: bool,
    preserve_rng_state: bool,
    early_stop: bool,
    respect_saved_tensors_hooks: bool | None,
    policy: Any,
    offload_inputs: bool,
    rng_trackers: Sequence[rng.GetTracker],
) -> Any:
    """Under torch.compile: torch's own checkpoint, which the compiler knows as one operator.

    The compiler ignores determinism_check, preserve_rng_state (always on) and early_stop (always off):
    none of them changes a result there. What would change it raises.
    """
    if use_reentrant:
        raise ValueError("checkpoint: use_reentrant=True is not supported. Drop the keyword.")
    if _is_compilable(policy):
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    elif policy is not None and policy != "recompute":
        raise ValueError(
            "checkpoint: this policy cannot be honoured under torch.compile. Pass 'recompute', a list of overloads "
            "such as torch.ops.aten.mm.default, or a policy function of torch's form, policy(ctx, op, *args, **kwargs)."
        )
    if offload_inputs:
        raise ValueError(
            "checkpoint: offload_inputs cannot be honoured under torch.compile. Leave it out, or keep this call out of "
            "the compiled function."
        )
    if rng_trackers:
        raise ValueError(
            "checkpoint: rng_trackers cannot be honoured under torch.compile, where torch's own checkpoint "
            "restores random state. Leave them out, or keep this call out of the compiled function."
        )
    options: dict[str, Any] = {}
    if respect_saved_tensors_hooks is not None:
        if "respect_saved_tensors_hooks" not in TORCH_PARAMETERS:
            raise ValueError(
                f"checkpoint: respect_saved_tensors_hooks={respect_saved_tensors_hooks} cannot be honoured under "
                f"torch.compile with torch {torch.__version__}, whose checkpoint does not have it. Leave it out."
            )
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    if context_fn is not noop_context_fn:
        options["context_fn"] = context_fn
    if debug:
        options["debug"] = debug
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        determinism_check=determinism_check,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        **options,
        **kwargs,
    )


def _is_compilable(policy: Any) -> bool:
    """Whether torch's create_selective_checkpoint_contexts takes a policy; the compiler traces this."""
    if isinstance(policy, list):
        return all(isinstance(op, torch._ops.OpOverload) for op in policy)
    code = getattr(policy, "__code__", None)
    return code is not None and (code.co_argcount > 1 or bool(code.co_flags & inspect.CO_VARARGS))
