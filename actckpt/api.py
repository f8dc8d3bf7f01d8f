"""The public functions: `checkpoint`, `checkpoint_sequential` and `offload`."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args, overload

import torch
from torch.utils.checkpoint import noop_context_fn
from typing_extensions import Unpack

from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import devices, extensions, random_state, torch_private
from actckpt._core.functions import check_runs_when_called
from actckpt._offload.device import no_backend
from actckpt._offload.session import DEFAULT_MIN_BYTES, Destination, Offloading
from actckpt._options import (
    CheckpointKeywords,
    CheckpointOptions,
    ContextFn,
    SequentialKeywords,
    check_call,
    check_no_call,
    meant_for_us,
)
from actckpt._text.sizes import parse_bytes
from actckpt.policies import Policy

__all__ = ["checkpoint", "checkpoint_sequential", "offload"]

_OFFLOAD_IN_COMPILED_CODE = (
    "actckpt.offload moves nothing inside of a compiled graph: it breaks the graph here. Enter it around the compiled "
    "function."
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")


@overload
def checkpoint(
    function: Callable[..., _Result],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: Policy | None = None,
    offload_inputs: bool = False,
    rng_trackers: Sequence[random_state.GetTracker] = (),
    **kwargs: Any,
) -> _Result: ...


@overload
def checkpoint(function: None = None, **options: Unpack[CheckpointKeywords]) -> Callable[[_Function], _Function]: ...


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
    policy: Policy | None = None,
    offload_inputs: bool = False,
    rng_trackers: Sequence[random_state.GetTracker] = (),
    **kwargs: Any,
) -> Any:
    """Run `function` without keeping what it saves for backward; backward runs it again.

    Drop-in for `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`. Works with every way of running
    backward: `backward`, `autograd.grad`, `retain_graph`, double backward, parts of a graph.

    Args:
        function: called with `*args` and `**kwargs`, once now and again in each backward. Must do the same each time.
            Without it, the result is a decorator: `@checkpoint(early_stop=False)`.
        use_reentrant: False or None. True raises.
        context_fn: returns two context managers, for the forward and for the reruns. Called once.
        determinism_check: `"default"` compares shape, dtype and device of every saved tensor, and checks that
            parameters did not change; `"none"` compares nothing.
        debug: errors list the operators of both runs. Costs a dispatch mode in both.
        preserve_rng_state: draw the same random numbers in reruns.
        early_stop: stop a rerun as soon as all needed tensors are restored. The context
            `torch.utils.checkpoint.set_checkpoint_early_stop` overrides it.
        respect_saved_tensors_hooks: None or True: the hooks that are active around the call (`save_on_cpu`) get what a
            selective `context_fn` or a policy keeps; False: that is held directly. Without such hooks it has no effect.
        policy: None or `"recompute"`: `function` runs again in backward. Any other policy of `region`: only single
            operators run again, as in `with region(policy):`.
        offload_inputs: offload the tensors that the region holds for its reruns or replays, as `offload` does. Inside
            another region, or under other saved-tensor hooks, it has no effect: those hold them.
        rng_trackers: callables that return random state trackers, in addition to those registered with
            `actckpt.rng.register_tracker`.
    Returns:
        The result of `function`; without a function, a decorator.
    Raises:
        ValueError: an invalid keyword.
        TypeError: `function` is not callable, or takes no keyword with a name that resembles one of these.
        CheckpointError: in backward, if a rerun saves other tensors than the forward, or if a tensor that it needs was
            changed in place.
    Cost: one more forward of `function` in backward. Memory: the inputs, and during its backward what `function` saves.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Example::

        >>> import torch, actckpt
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> y = actckpt.checkpoint(layer, torch.randn(2, 4))
        >>> y.sum().backward()
    """
    options = CheckpointOptions(
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
    if function is None:
        check_no_call(args, kwargs)
        return _decorator(options)
    if (kwargs or not callable(function) or isinstance(function, type)) and not torch.compiler.is_compiling():
        check_call(function, args, kwargs)
    return checkpoint_call(function, args, kwargs, options)


def _decorator(options: CheckpointOptions) -> Callable[[_Function], _Function]:
    """Return the decorator for `checkpoint` without a function."""
    options.check({})

    def decorate(function: _Function) -> _Function:
        check_runs_when_called(function, "checkpoint")

        @functools.wraps(function)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint_call(function, args, kwargs, options)

        return checkpointed  # type: ignore[return-value]

    return decorate


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 - torch's name
    use_reentrant: bool | None = False,
    **kwargs: Unpack[SequentialKeywords],
) -> Any:
    """Run a sequence of functions in `segments` pieces; all but the last one are checkpointed.

    Drop-in for `torch.utils.checkpoint.checkpoint_sequential`; also takes the keywords of `checkpoint`.

    Args:
        functions: a `torch.nn.Sequential`, or functions that each take the result of the previous one.
        segments: number of pieces, from 1 to the number of functions.
        input: passed to the first function.
        use_reentrant: False or None. True raises.
        **kwargs: keywords of `checkpoint`.
    Returns:
        The result of the last function.
    Raises:
        ValueError: an invalid keyword, or number of segments.

    Example::

        >>> import torch, actckpt
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> actckpt.checkpoint_sequential(model, 3, torch.randn(2, 4)).sum().backward()
    """
    unknown = sorted(set(kwargs) - set(CheckpointOptions._fields))
    if unknown:
        hint = meant_for_us(unknown[0])
        raise ValueError(
            f"checkpoint_sequential: unexpected keyword arguments {', '.join(unknown)}. Only keywords of "
            f"actckpt.checkpoint are taken; functions get one argument.{hint and f' {hint}'}"
        )
    if not isinstance(functions, Iterable):
        raise TypeError(
            f"checkpoint_sequential: functions is a {type(functions).__name__}. Pass a Sequential or a list of "
            "functions, then the number of segments, then the input."
        )
    steps = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else list(functions)
    if not isinstance(segments, numbers.Integral) or not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments={segments!r} does not fit {len(steps)} functions. "
            f"Pass a number from 1 to {max(len(steps), 1)}."
        )
    size = len(steps) // segments
    for start in range(0, size * (segments - 1), size):
        piece = steps[start : start + size]
        input = checkpoint(_run_in_turn, piece, input, use_reentrant=use_reentrant, **kwargs)  # noqa: A001
    return _run_in_turn(steps[size * (segments - 1) :], input)


def offload(to: Destination = "auto", *, min_bytes: int | str = DEFAULT_MIN_BYTES) -> Offloading:
    """Offload the tensors that operators save inside the block to a store, and load them in time for backward.

    Works around any code, including compiled functions. Inside a compiled function it breaks the graph, and the
    function that enters it runs eagerly (`fullgraph=True` raises). Parameters, buffers and their views stay. Each
    storage is copied once, however many tensors share it. Also a decorator: `@actckpt.offload()`.

    Args:
        to: `"host"`: pinned host memory, for GPU tensors; `"disk"`: a spill file, for CPU tensors; `"auto"`: by device.
        min_bytes: smaller tensors stay. A number, or a text like `"4MiB"`.
    Returns:
        A context manager. It can be reused, and entered by several threads.
    Raises:
        ValueError: an invalid argument, or `"host"` without an accelerator whose tensors can be offloaded.
        OffloadError: at the first tensor, if the store is not available (an unwritable folder, no driver, an
            accelerator that the engine has no backend for).
        SavedTensorChangedError: in backward, if a tensor was changed in place after it was saved.
    Cost: copies overlap with compute where possible; see docs/offload.md.

    Example::

        >>> import torch, actckpt
        >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> with actckpt.offload(min_bytes="1KiB"):
        ...     y = layer(torch.randn(256, 64))
        >>> y.sum().backward()
    """
    if torch.compiler.is_compiling():
        torch_private.graph_break(_OFFLOAD_IN_COMPILED_CODE)
    if callable(to):
        kind = type(to).__name__
        raise ValueError(
            f"offload: to is a {kind}, not a store. To run it under offload: with actckpt.offload(): y = model(x). "
            "Each block of a model: actckpt.apply(model, policy='offload')."
        )
    if to not in get_args(Destination):
        raise ValueError(f"offload: to={to!r} is not a store. Pass 'auto', 'host' or 'disk'.")
    if to == "host":
        _check_that_devices_can_be_offloaded()
    extensions.register_lazy_extensions()
    return Offloading(to, parse_bytes(min_bytes, what="offload: min_bytes"))


def _check_that_devices_can_be_offloaded() -> None:
    accelerator = devices.available()
    if accelerator is None:
        raise ValueError(
            "offload: to='host' moves tensors off a GPU, and there is none here (torch.accelerator.is_available() is "
            "False). CPU tensors are in host memory already: pass 'disk' or 'auto'."
        )
    if why := no_backend(accelerator.device_type):
        raise ValueError(f"offload: to='host' moves tensors off a GPU, and {why}")


def _run_in_turn(functions: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value
