"""A call of `checkpoint`: runs the function in the kind of region that its options select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import noop_context_fn

from actckpt import _C
from actckpt._compile.checkpoint import compiled_checkpoint, why_eager
from actckpt._core import devices, extensions, messages, random_state, torch_private
from actckpt._core.functions import is_of_module
from actckpt._core.region_report import Figures
from actckpt._offload.owned_memory import keep_in_place
from actckpt._offload.session import DEFAULT_MIN_BYTES, Session
from actckpt._options import NEWER_KEYWORDS, CheckpointOptions, ContextFn
from actckpt._replay.call_sites import Site, site_of_call
from actckpt._replay.calls import RegionOptions, run_in_region
from actckpt._replay.choice import Choice
from actckpt._rerun.audit import RerunAudit, audit_of
from actckpt._rerun.region import Region
from actckpt.policies import Policy, choice_of, selective_choice

__all__ = ["checkpoint_call"]

_PLAIN = RegionOptions()


def checkpoint_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    *,
    input_hooks: torch_private.Hooks | None = None,
    inside: RegionOptions = _PLAIN,
    is_eager: bool = False,
) -> Any:
    """Do what `checkpoint` does, for a function whose own keywords may have the names of options.

    Args:
        input_hooks: (pack, unpack) for the tensors that the region holds for its reruns.
        inside: what the region records, and how its operators are named.
        is_eager: it is not traced, even if something is compiled, perhaps in another thread.
    """
    if not is_eager and torch.compiler.is_compiling():
        return _checkpoint_in_compiled_code(function, args, kwargs, options, input_hooks)
    policy = _policy_of(options, inside)
    if options.use_reentrant or policy is not None or options.determinism_check != "default" or NEWER_KEYWORDS:
        options.check(kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if extensions.lazy_extensions:
        extensions.register_lazy_extensions()
    if policy is not None and policy != "recompute":
        if not (site := site_of_call(function, args, kwargs)).is_rerun:
            return _replayed(choice_of(policy), site, function, args, kwargs, options, inside)
        options = options._replace(preserve_rng_state=True)  # as replay does

    if (forced := torch_private.forced_by_context()) != (None, None):
        options = _forced(options, *forced)
    check_metadata = options.determinism_check == "default"
    audit: RerunAudit | Literal[False] | None = None
    if check_metadata:
        audit = audit_of(function, raises=options.preserve_rng_state)
    try:
        result = _run_common(function, args, kwargs, options, input_hooks, audit)
        if result is not NotImplemented:
            return result
        return _run(function, args, kwargs, options, input_hooks, inside.figures, audit)
    except RuntimeError as error:
        messages.raise_if_hooks_are_refused(error, "checkpoint")
        raise


def _policy_of(options: CheckpointOptions, inside: RegionOptions) -> Policy | None:
    """Return the policy. In a capture, what a plan reruns is replayed: a rerun would draw other random numbers."""
    is_captured = inside.counts_anew and options.policy == "recompute" and devices.is_capturing()
    return [] if is_captured else options.policy


def _run_common(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    input_hooks: torch_private.Hooks | None,
    audit: RerunAudit | Literal[False] | None,
) -> Any:
    """Run a common region without Python code around the function; C++ decides too whether it is one.

    If it is none, nothing runs, and the result is NotImplemented.
    """
    is_uncommon = kwargs or input_hooks or options.debug or options.offload_inputs or options.rng_trackers
    has_contexts = options.context_fn is not noop_context_fn or extensions.around_regions
    if is_uncommon or has_contexts or not is_of_module(function):
        return NotImplemented
    return _run_in(None, function, args, kwargs, options, audit)


def _run_in(
    region: Region | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    audit: RerunAudit | Literal[False] | None,
) -> Any:
    forward = function if region is None else region.forward_of(function)
    early_stop, check_metadata = options.early_stop, options.determinism_check == "default"
    return _C.run(
        region, function, forward, args, kwargs, early_stop, options.preserve_rng_state, check_metadata, audit
    )


#: For use between two compiled graphs, where the compiler would trace it and must not.
_checkpoint_eagerly = torch_private.disable_dynamo(checkpoint_call)


def _checkpoint_in_compiled_code(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    input_hooks: torch_private.Hooks | None,
) -> Any:
    """Let the compiler trace policies by operator; run everything else between two compiled graphs."""
    if why := why_eager(options):
        torch_private.graph_break(why)
    else:
        return compiled_checkpoint(function, args, kwargs, options)
    return _checkpoint_eagerly(function, args, kwargs, options, input_hooks=input_hooks, is_eager=True)


def _replayed(
    choice: Choice,
    site: Site,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    inside: RegionOptions,
) -> Any:
    """Run the function in a region that replays operators; it offloads its inputs if the options say so."""
    if options.offload_inputs:
        keep_in_place(function)
        choice = choice.offloading_inputs(DEFAULT_MIN_BYTES)
    respects_hooks = options.respect_saved_tensors_hooks is not False
    return run_in_region(choice, site, function, args, kwargs, respects_hooks, inside)


def _forced(options: CheckpointOptions, early_stop: bool | None, debug: bool | None) -> CheckpointOptions:
    """Return the options, overridden by torch's contexts."""
    return options._replace(
        early_stop=options.early_stop if early_stop is None else early_stop,
        debug=options.debug if debug is None else debug,
    )


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CheckpointOptions,
    input_hooks: torch_private.Hooks | None,
    figures: Figures | None,
    audit: RerunAudit | Literal[False] | None,
) -> Any:
    """Run the function in a region without a policy."""
    contexts = None
    if options.context_fn is not noop_context_fn and not options.debug:
        contexts = options.make_contexts()
        selective = selective_choice(contexts[0])
        if selective is not None:
            site = site_of_call(function, args, kwargs)
            if not site.is_rerun:
                return _replayed(selective, site, function, args, kwargs, options, RegionOptions(figures=figures))
            contexts, options = None, options._replace(preserve_rng_state=True)
    if options.offload_inputs:
        keep_in_place(function)
        input_hooks = Session("auto", DEFAULT_MIN_BYTES).hooks
    if options.preserve_rng_state and devices.is_capturing():
        raise random_state.capturing_error(messages.name_of(function))
    call = (function, args, kwargs)
    region = Region(call, input_hooks, options.rng_trackers, restores_random=options.preserve_rng_state)
    if options.debug:
        _trace(region, options.context_fn)
    elif contexts is not None:
        region.forward_context, region.rerun_context = contexts
    return _run_in(region, function, args, kwargs, options, audit)


def _trace(region: Region, context_fn: ContextFn) -> None:
    if context_fn is not noop_context_fn:
        raise ValueError(
            "checkpoint: debug=True is incompatible with non-default context_fn. Drop one of the two keywords."
        )
    region.trace = messages.Trace()
    region.forward_context, region.rerun_context = region.trace.forward_mode, region.trace.rerun_mode
