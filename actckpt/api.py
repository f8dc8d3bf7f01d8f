"""The public functions: `checkpoint`, `checkpoint_sequential` and `offload`."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from actckpt import _C
from actckpt._compile.checkpoint import BY_OPERATOR, TORCH_PARAMETERS, ContextFn, compiled_checkpoint, goes_by_operator
from actckpt._core import extensions, messages, random_state, torch_private
from actckpt._core.functions import check_runs_when_called, is_of_module
from actckpt._offload.owned import keep_in_place
from actckpt._offload.session import DEFAULT_MIN_BYTES, Offloading, Session
from actckpt._replay.audit import caller_of, site_of
from actckpt._replay.calls import run_in_region
from actckpt._replay.matches import Matches
from actckpt._rerun.packed import held_inputs
from actckpt._rerun.region import Region
from actckpt._text.sizes import parse_bytes
from actckpt.policies import choice_of, selective_choice

__all__ = ["checkpoint", "checkpoint_sequential", "offload"]


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: Any = None,
    offload_inputs: bool = False,
    rng_trackers: Sequence[random_state.GetTracker] = (),
    **kwargs: Any,
) -> Any:
    """Run `function` without keeping what it saves for backward; backward runs it again.

    Drop-in for `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`. Works with every way
    of running backward: `backward`, `autograd.grad`, `retain_graph`, double backward, parts of a graph.

    Args:
        function: called with `*args` and `**kwargs`, once now and again in each backward. Must do the same
            each time. Without it, the result is a decorator: `@checkpoint(early_stop=False)`.
        use_reentrant: False or None. True raises.
        context_fn: returns two context managers, for the forward and for the reruns. Called once.
        determinism_check: `"default"` compares shape, dtype and device of every saved tensor, and
            that parameters did not change; `"none"` compares nothing.
        debug: errors list the operators of both runs. Costs a dispatch mode in both.
        preserve_rng_state: draw the same random numbers in reruns.
        early_stop: end a rerun as soon as everything needed is back. The context
            `torch.utils.checkpoint.set_checkpoint_early_stop` wins over it.
        respect_saved_tensors_hooks: None or True: the hooks that are active around the call (`save_on_cpu`) get what
            a selective `context_fn` or a policy keeps; False: that is held as it is. Has no effect without them.
        policy: None or `"recompute"`: `function` runs again in backward. Any other policy of `region`: nothing runs
            again but single operators, as in `with region(policy):`.
        offload_inputs: move the tensors that the region holds for its reruns to a store, as `offload` does.
            Inside another region it does nothing: that one frees them.
        rng_trackers: callables that return random state trackers, in addition to those registered
            with `actckpt.rng.register_tracker`.
    Returns:
        What `function` returns; without a function, a decorator.
    Raises:
        ValueError: a bad keyword.
        TypeError: `function` cannot be called, or takes no keyword of a name that is nearly one of these.
        CheckpointError: in backward, when a rerun saves other tensors than the forward, or when a
            tensor that it needs was changed in place.
    Cost: one more forward of `function` in backward. Memory: the inputs, and during its backward what
        `function` saves.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Example::

        >>> import torch, actckpt
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> y = actckpt.checkpoint(layer, torch.randn(2, 4))
        >>> y.sum().backward()
    """
    if function is None:
        given = locals()
        return _decorator(args, kwargs, {name: given[name] for name in _KEYWORDS})
    if (kwargs or not callable(function)) and not torch.compiler.is_compiling():
        _check_call(function, args, kwargs)
    return checkpoint_call(
        function,
        args,
        kwargs,
        use_reentrant=use_reentrant,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        policy=policy,
        offload_inputs=offload_inputs,
        rng_trackers=rng_trackers,
    )


_PARAMETERS = inspect.signature(checkpoint).parameters
_KEYWORDS = [name for name, parameter in _PARAMETERS.items() if parameter.kind is parameter.KEYWORD_ONLY]
#: Keywords of the installed torch's checkpoint that came after this file was written, with their defaults.
_UNKNOWN_TORCH_KEYWORDS = {
    name: parameter.default
    for name, parameter in TORCH_PARAMETERS.items()
    if parameter.default is not parameter.empty and name not in _PARAMETERS
}


def _check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where what is to be called cannot be, or cannot take a keyword that was meant for `checkpoint`."""
    if not callable(function):
        kind = f"a tensor of shape {tuple(function.shape)}" if isinstance(function, torch.Tensor) else repr(function)
        order = "The function comes first" if any(map(callable, args)) else "Pass it uncalled, its arguments after it"
        raise TypeError(
            f"checkpoint: {kind} is not a function. {order}: checkpoint(layer, x), not checkpoint(layer(x))."
        )
    for name in kwargs:
        hint = _meant_for_us(name)
        if hint and not _takes_keyword(function, name):
            raise TypeError(
                f"checkpoint: neither checkpoint nor {messages.name_of(function)} has a keyword {name!r}. {hint}"
            )


@functools.lru_cache(maxsize=4096)
def _meant_for_us(name: str) -> str:
    if name == "min_bytes":
        return "To offload from a size on: with actckpt.offload(min_bytes=...): y = layer(x)."
    near = difflib.get_close_matches(name, _KEYWORDS, n=1, cutoff=0.8)
    return f"Did you mean {near[0]}?" if near else ""


def _takes_keyword(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(
            function.forward if isinstance(function, torch.nn.Module) else function
        ).parameters
    except ValueError:  # a builtin that has none
        return True
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _decorator(args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return what `checkpoint` without a function returns."""
    if args or kwargs:
        unexpected = [f"{len(args)} arguments"] * bool(args) + [f"keyword {name!r}" for name in kwargs]
        near = [match for name in kwargs for match in difflib.get_close_matches(name, _KEYWORDS, n=1)]
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(
            f"checkpoint: no function was given, but {', '.join(unexpected)}. Arguments go to the decorated function: "
            f"checkpoint(use_reentrant=False)(fn)(*args).{hint}"
        )
    _check_keywords(
        options["use_reentrant"],
        options["policy"],
        options["context_fn"],
        options["offload_inputs"],
        options["determinism_check"],
        {},
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_runs_when_called(function, "checkpoint")

        @functools.wraps(function)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint_call(function, args, kwargs, **options)

        return checkpointed

    return decorate


def checkpoint_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: Any = None,
    offload_inputs: bool = False,
    rng_trackers: Sequence[random_state.GetTracker] = (),
    input_hooks: torch_private.Hooks | None = None,
    matches: Matches | None = None,
) -> Any:
    """Do what `checkpoint` does, for a function whose own keywords may have the names of options.

    Args:
        input_hooks: (pack, unpack) for the tensors that the region holds for its reruns.
        matches: gets the operators that run, of those that the policy names.
    """
    if torch.compiler.is_compiling():
        if not goes_by_operator(policy):
            torch_private.graph_break(BY_OPERATOR)
            return _checkpoint_eagerly(
                function,
                args,
                kwargs,
                use_reentrant=use_reentrant,
                context_fn=context_fn,
                determinism_check=determinism_check,
                debug=debug,
                preserve_rng_state=preserve_rng_state,
                early_stop=early_stop,
                respect_saved_tensors_hooks=respect_saved_tensors_hooks,
                policy=policy,
                offload_inputs=offload_inputs,
                rng_trackers=rng_trackers,
                input_hooks=input_hooks,
            )
        return compiled_checkpoint(
            function,
            args,
            kwargs,
            use_reentrant,
            context_fn,
            determinism_check,
            debug,
            preserve_rng_state,
            early_stop,
            respect_saved_tensors_hooks,
            policy,
            offload_inputs,
            rng_trackers,
        )
    if use_reentrant or policy is not None or determinism_check != "default" or _UNKNOWN_TORCH_KEYWORDS:
        _check_keywords(use_reentrant, policy, context_fn, offload_inputs, determinism_check, kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if extensions.awaited:
        extensions.register_awaited()
    if policy is not None and policy != "recompute":
        choice, site = choice_of(policy), site_of(caller_of(function, args, kwargs))
        if not site.is_rerun:
            respects_hooks = respect_saved_tensors_hooks is not False
            return run_in_region(choice, site, function, args, kwargs, respects_hooks, matches)
        preserve_rng_state = True  # as replay does

    forced_early_stop, forced_debug = torch_private.forced_by_context()
    if forced_early_stop is not None:
        early_stop = forced_early_stop
    if forced_debug is not None:
        debug = forced_debug
    check_metadata = determinism_check == "default"
    # The common kind runs without Python code around the function; the extension says if it is one.
    is_uncommon = kwargs or debug or offload_inputs or rng_trackers or input_hooks or context_fn is not noop_context_fn
    if not (is_uncommon or extensions.around_regions) and is_of_module(function):
        result = _C.run_common(function, args, early_stop, preserve_rng_state, check_metadata)
        if result is not NotImplemented:
            return result

    contexts = None
    if context_fn is not noop_context_fn and not debug:
        contexts = context_fn()
        selective = selective_choice(contexts[0])
        if selective is not None:
            _check_replays(offload_inputs, "context_fn")
            site = site_of(caller_of(function, args, kwargs))
            if not site.is_rerun:
                return run_in_region(selective, site, function, args, kwargs, respect_saved_tensors_hooks is not False)
            contexts, preserve_rng_state = None, True
    if offload_inputs:
        keep_in_place(function)
        input_hooks = Session("auto", DEFAULT_MIN_BYTES).hooks
    inputs = held_inputs(function, args, kwargs, input_hooks, random_state.known_trackers(rng_trackers))
    region = Region(inputs)
    if preserve_rng_state and not random_state.is_capturing():
        region.random = random_state.RandomState(inputs.devices, inputs.generators, rng_trackers)
    if debug:
        _trace(region, context_fn)
    elif contexts is not None:
        region.forward_context, region.rerun_context = contexts
    return region.run(function, args, kwargs, early_stop=early_stop, check_metadata=check_metadata)


#: The same where the compiler would trace it and must not: it runs in between two compiled graphs.
_checkpoint_eagerly = torch_private.disable_dynamo(checkpoint_call)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 - torch's name
    use_reentrant: bool | None = False,
    **kwargs: Any,
) -> Any:
    """Run a sequence of functions in `segments` pieces, each but the last one checkpointed.

    Drop-in for `torch.utils.checkpoint.checkpoint_sequential`; takes the keywords of `checkpoint` too.

    Args:
        functions: a `torch.nn.Sequential`, or functions that each take the result of the one before.
        segments: number of pieces, from 1 to the number of functions.
        input: what the first function gets.
        use_reentrant: False or None. True raises.
        **kwargs: keywords of `checkpoint`.
    Returns:
        What the last function returns.
    Raises:
        ValueError: a bad keyword, or a number of segments that does not fit.

    Example::

        >>> import torch, actckpt
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> actckpt.checkpoint_sequential(model, 3, torch.randn(2, 4)).sum().backward()
    """
    unknown = sorted(set(kwargs) - set(inspect.signature(checkpoint).parameters))
    if unknown:
        raise ValueError(
            f"checkpoint_sequential: unexpected keyword arguments {', '.join(unknown)}. "
            "Only keywords of actckpt.checkpoint are taken; functions get one argument."
        )
    steps = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments={segments} does not fit {len(steps)} functions. "
            f"Pass a number from 1 to {max(len(steps), 1)}."
        )
    size = len(steps) // segments
    for start in range(0, size * (segments - 1), size):
        piece = steps[start : start + size]
        input = checkpoint(_run_in_turn, piece, input, use_reentrant=use_reentrant, **kwargs)  # noqa: A001
    return _run_in_turn(steps[size * (segments - 1) :], input)


def offload(to: str = "auto", *, min_bytes: int | str = DEFAULT_MIN_BYTES) -> Offloading:
    """Move what operators save inside the block to a store, and bring it back in time for backward.

    Works around any code, compiled functions included. Inside a compiled function it breaks the graph, and the
    function that enters it runs eagerly (`fullgraph=True` raises). Parameters, buffers and their views stay; each
    storage is copied once, however many tensors share it. Also a decorator: `@actckpt.offload()`.

    Args:
        to: `"host"`: pinned host memory, for tensors on a GPU; `"disk"`: a spill file, for tensors of the
            CPU; `"auto"`: each where it belongs.
        min_bytes: smaller tensors stay. A number, or a text like `"4MiB"`.
    Returns:
        A context manager. It may be entered again, and by several threads.
    Raises:
        ValueError: a bad argument, or `"host"` where there is no accelerator.
        EngineError: at the first tensor, if the store cannot be had (an unwritable folder, no driver).
        SavedTensorChangedError: in backward, when a tensor was changed in place after it was saved.
    Cost: copies overlap with compute where there is any to overlap with; see docs/offload.md.

    Example::

        >>> import torch, actckpt
        >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> with actckpt.offload(min_bytes="1KiB"):
        ...     y = layer(torch.randn(256, 64))
        >>> y.sum().backward()
    """
    if callable(to):
        kind = type(to).__name__
        raise ValueError(
            f"offload: to is a {kind}, not a store. To run it under offload: with actckpt.offload(): y = model(x). "
            "Each block of a model: actckpt.apply(model, policy='offload')."
        )
    if to not in ("auto", "host", "disk"):
        raise ValueError(f"offload: to={to!r} is not a store. Pass 'auto', 'host' or 'disk'.")
    if to == "host" and not torch.cuda.is_available():
        raise ValueError(
            "offload: to='host' moves tensors off a GPU, and there is none here (torch.cuda.is_available() is False). "
            "CPU tensors are in host memory already: pass 'disk' or 'auto'."
        )
    extensions.register_awaited()
    return Offloading(to, parse_bytes(min_bytes, what="min_bytes"))


def _run_in_turn(functions: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def _check_keywords(
    use_reentrant: bool | None,
    policy: Any,
    context_fn: ContextFn,
    offload_inputs: bool,
    determinism_check: str,
    kwargs: dict[str, Any],
) -> None:
    if use_reentrant:
        raise ValueError(
            "checkpoint: use_reentrant=True is not supported; actckpt has the non-reentrant variant only, which "
            "does all that the reentrant one does. Drop the keyword or pass use_reentrant=False, or keep "
            "torch.utils.checkpoint.checkpoint for this call."
        )
    if policy is not None and context_fn is not noop_context_fn:
        raise ValueError(
            "checkpoint: policy= and context_fn= both say what to recompute. Pass one of the two; a policy function of "
            "torch's create_selective_checkpoint_contexts can be passed as policy= unchanged."
        )
    if policy is not None and policy != "recompute":
        _check_replays(offload_inputs, f"policy={policy!r}")
    if determinism_check not in ("default", "none"):
        raise ValueError(
            f"checkpoint: determinism_check should be one of ['default', 'none'], but got {determinism_check!r}."
        )
    for name in _UNKNOWN_TORCH_KEYWORDS.keys() & kwargs.keys():
        if kwargs.pop(name) != _UNKNOWN_TORCH_KEYWORDS[name]:
            raise ValueError(
                f"checkpoint: the keyword {name!r} of torch {torch.__version__} is newer than this version of "
                f"actckpt, which honours its default {_UNKNOWN_TORCH_KEYWORDS[name]!r} only. Leave it out."
            )


def _check_replays(offload_inputs: bool, what: str) -> None:
    if offload_inputs:
        raise ValueError(
            "checkpoint: offload_inputs=True goes with policy=None, whose reruns hold the inputs of the region. With "
            f"this {what} operators are replayed: use a policy= function that returns Action.OFFLOAD where its "
            "SavedTensorInfo.is_input is True."
        )


def _trace(region: Region, context_fn: ContextFn) -> None:
    if context_fn is not noop_context_fn:
        raise ValueError(
            "checkpoint: debug=True is incompatible with non-default context_fn. Drop one of the two keywords."
        )
    region.trace = messages.Trace()
    region.forward_context, region.rerun_context = region.trace.forward_mode, region.trace.rerun_mode
