"""`checkpoint` under torch.compile: torch's own, which the compiler knows as one operator."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from actckpt import config
from actckpt._core import torch_private
from actckpt._options import TORCH_PARAMETERS, CheckpointOptions, ContextFn
from actckpt._replay.choice import Choice
from actckpt._text.places import Selector
from actckpt._text.presets import PRESETS
from actckpt.action import Action
from actckpt.policies import PerOp, choice_of, is_torch_policy

__all__ = ["compiled_checkpoint", "why_eager"]

_MOVES_NOTHING = (
    f"torch.compile of torch {torch.__version__} moves nothing: keep or recompute it, or keep this call out of the "
    "compiled function."
)
#: Error text for a policy that torch's checkpoint cannot express.
_BY_OPERATOR = (
    "actckpt.checkpoint: this policy cannot be honoured under torch.compile. Pass 'recompute', 'keep', 'attention', "
    "'matmuls', a list of operators to keep, a PerOp of keep and recompute, or a policy function of torch's form, "
    f"policy(ctx, op, *args, **kwargs). To offload: {_MOVES_NOTHING}"
)
#: torch 2.9 cannot hold such a policy as a constant. Delete with torch 2.9.
_TAKES_OBJECTS = torch.__version__ >= "2.10"  # compares versions, not texts
_NO_OBJECT = (
    f"actckpt.checkpoint: torch.compile of torch {torch.__version__} takes no callable object and no method as policy. "
    "Pass a function, policy(ctx, op, *args, **kwargs), or keep this call out of the compiled function."
)
_NO_OBJECTS = (str, Action, list, tuple, set, frozenset, PerOp, FunctionType, functools.partial)
_NOT_INPUTS = (
    "actckpt.checkpoint: offload_inputs cannot be honoured under torch.compile. Leave it out, or keep this call out of "
    "the compiled function."
)
_NO_TRACKERS = (
    "actckpt.checkpoint: rng_trackers cannot be honoured under torch.compile, where torch's own checkpoint restores "
    "random state. Leave them out, or keep this call out of the compiled function."
)
_NEVER = object()


def compiled_checkpoint(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CheckpointOptions
) -> Any:
    """Run torch's own checkpoint under torch.compile, which knows it as one operator.

    The compiler ignores determinism_check, preserve_rng_state (always on) and early_stop (always off): none of them
    changes a result there. Options that would change one raise.
    """
    policy, context_fn = options.policy, options.context_fn
    if options.use_reentrant:
        raise ValueError("checkpoint: use_reentrant=True is not supported. Drop the keyword.")
    if policy == "keep" or policy is Action.KEEP or torch.compiler.is_exporting():
        return function(*args, **kwargs)
    if policy is not None and policy != "recompute" and policy is not Action.RECOMPUTE:
        context_fn = _contexts_by(policy)
    elif context_fn is not noop_context_fn:
        context_fn = functools.partial(_watched_contexts, context_fn)
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        determinism_check=options.determinism_check,
        preserve_rng_state=options.preserve_rng_state,
        early_stop=options.early_stop,
        **_only_where_given(options, context_fn),
        **kwargs,
    )


def _only_where_given(options: CheckpointOptions, context_fn: ContextFn) -> dict[str, Any]:
    """Return keyword arguments for torch's checkpoint that the compiler, or an older torch, may not accept."""
    passed: dict[str, Any] = {}
    respects_hooks = options.respect_saved_tensors_hooks
    if respects_hooks is not None:
        if "respect_saved_tensors_hooks" not in TORCH_PARAMETERS:
            raise ValueError(
                f"checkpoint: respect_saved_tensors_hooks={respects_hooks} cannot be honoured under "
                f"torch.compile with torch {torch.__version__}, whose checkpoint does not have it. Leave it out."
            )
        passed["respect_saved_tensors_hooks"] = respects_hooks
    if context_fn is not noop_context_fn:
        passed["context_fn"] = context_fn
    if options.debug:
        passed["debug"] = True
    return passed


def why_eager(options: CheckpointOptions) -> str:
    """Return why a call must not be compiled, or an empty text; the compiler traces this."""
    if not _goes_by_operator(options.policy):
        return _BY_OPERATOR
    if not (_TAKES_OBJECTS or options.policy is None or isinstance(options.policy, _NO_OBJECTS)):
        return _NO_OBJECT
    if options.offload_inputs:
        return _NOT_INPUTS
    return _NO_TRACKERS if options.rng_trackers else ""


def _goes_by_operator(policy: Any) -> bool:
    """Whether torch's checkpoint can express a policy. Does not call it: the compiler traces this function."""
    if policy is None or isinstance(policy, (list, tuple, set, frozenset)):
        return True
    if isinstance(policy, (str, Action)):
        return policy in ("recompute", "keep", Action.RECOMPUTE, Action.KEEP) or policy in PRESETS
    if isinstance(policy, PerOp):
        return not policy.moves
    if isinstance(policy, Mapping):  # a table of places
        return False
    code = getattr(policy, "__code__", None)
    if code is None:  # a partial function, or an object
        return callable(policy)
    return code.co_argcount - len(policy.__defaults__ or ()) > 1 or bool(code.co_flags & inspect.CO_VARARGS)


def _contexts_by(policy: Any) -> ContextFn:
    """Return the `context_fn` of a policy by operator; the compiler traces this.

    It passes functions and plain values; torch 2.9 accepts no other objects, so a PerOp is passed as its fields.
    """
    if isinstance(policy, PerOp):
        return functools.partial(_contexts_of, tuple(policy.names.items()), policy.default)
    return functools.partial(_contexts, policy)


def _contexts_of(actions: tuple[tuple[str, Action], ...], default: Action) -> Any:
    """Return the contexts of a PerOp, for torch's checkpoint."""
    return create_selective_checkpoint_contexts(functools.partial(_answer, Choice(dict(actions), default)))


def _contexts(policy: Any) -> Any:
    """Return the contexts of any other policy by operator.

    An unsupported action raises here: torch's checkpoint leaves contexts entered if an operator inside of them fails.
    """
    if not callable(policy):
        return create_selective_checkpoint_contexts(functools.partial(_answer, choice_of(policy)))
    if not is_torch_policy(policy):
        raise ValueError(_BY_OPERATOR)
    return create_selective_checkpoint_contexts(functools.partial(_asked_by_torch, policy))


def _answer(choice: Choice, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Answer the compiler's query about an operator."""
    is_opaque = any(Selector.parse(name).is_of_operator(str(op)) for name in config.settings().opaque)
    keeps = is_opaque or choice.of(str(op)) is Action.KEEP
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _watched_contexts(context_fn: ContextFn) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpoint; if they are selective, their policy must not offload."""
    forward, rerun = context_fn()
    policy = torch_private.selective_policy(forward)
    if policy is not None:
        torch_private.set_selective_policy(forward, functools.partial(_asked_by_torch, policy))
    return forward, rerun


def _asked_by_torch(policy: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _refuse_to_move(policy(context, op, *args, **kwargs), op)


def _refuse_to_move(answer: Any, op: Any) -> Any:
    """Return a policy's answer for an operator; raises if it is to offload, since no compiler reads the tag."""
    if answer is getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", _NEVER):
        raise ValueError(f"actckpt.checkpoint: the policy answers MUST_CPU_OFFLOAD for {op}, but {_MOVES_NOTHING}")
    return answer
