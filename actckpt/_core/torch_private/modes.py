"""Private names of torch for a thread's modes: stacks of function and dispatch modes, and autocast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from actckpt._core.torch_private.lookup import lookup, optional, reader

#: The stack of function modes of this thread.
num_function_modes: Callable[[], int] = lookup("torch._C._len_torch_function_stack")
is_function_mode_enabled: Callable[[], bool] = lookup("torch._C._is_torch_function_mode_enabled")
_function_mode_at: Callable[[int], Any] = lookup("torch._C._get_function_stack_at")
_push_function_mode: Callable[[Any], None] = lookup("torch._C._push_on_torch_function_stack")
_pop_function_mode: Callable[[], Any] = lookup("torch._C._pop_torch_function_stack")

#: The stack of dispatch modes of this thread.
num_dispatch_modes: Callable[[], int] = lookup("torch._C._len_torch_dispatch_stack")
dispatch_mode_at: Callable[[int], Any] = lookup("torch._C._get_dispatch_stack_at")
push_dispatch_mode: Callable[[Any], None] = lookup("torch._C._push_on_torch_dispatch_stack")
pop_dispatch_mode: Callable[[], Any] = partial(lookup("torch._C._pop_torch_dispatch_stack"), None)

_dispatch_names: Any = lookup("torch.utils._python_dispatch")
#: The same, including what torch keeps in Python beside the stack.
pop_mode: Callable[[], Any] = lookup("torch.utils._python_dispatch._pop_mode")
push_mode: Callable[[Any], None] = lookup("torch.utils._python_dispatch._push_mode")
_mode_of_kind = lookup("torch._C._get_dispatch_mode")
_tracing = reader("torch._C._TorchDispatchModeKey.PROXY")

#: The module that holds the default device.
_device_names: Any = lookup("torch.utils._device")
_default_device = reader("torch.utils._device.CURRENT_DEVICE")
_device_context = lookup("torch.utils._device.DeviceContext")

#: Contexts below which no function mode and no dispatch mode sees calls.
without_functions: Callable[[], Any] = lookup("torch._C.DisableTorchFunction")
without_dispatch: Callable[[], Any] = lookup("torch._C._DisableTorchDispatch")

#: Whether autocast is on for any device.
any_autocast_enabled: Callable[[], bool] = lookup("torch._C._is_any_autocast_enabled")

#: Whether compiled functions can run below a dispatch mode. Before torch 2.10 their guards fail below any mode, so they
#: would be recompiled at each call.
_set_is_traced = optional("torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals")
runs_compiled_below_modes: bool = _set_is_traced is not None

#: Dispatch modes of torch that change no results. If one is missing, it counts as unknown: values below it are kept.
OBSERVING_MODES = frozenset(
    {
        "torch.utils.flop_counter._FlopCounterMode",
        "torch.utils._debug_mode.DebugMode",
        "torch.utils._debug_mode._mode.DebugMode",
        "torch.utils._cuda_debug._TensorTrackingMode",
        "torch.utils.checkpoint._CachedTorchDispatchMode",
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        "torch.autograd.graph._CloneArgBeforeMutateMode",
        "torch.cuda._sanitizer.CUDASanitizerDispatchMode",
        "torch.distributed._tools.mem_tracker.MemTracker",
        "torch.distributed._tools.memory_tracker.MemoryProfileDispatchMode",
        "torch.distributed._tools.runtime_estimator.RuntimeEstimator",
        "torch.distributed._tools.sac_estimator.SACEstimator",
        "torch.distributed.tensor.debug.CommDebugMode",
        "torch.testing._internal.logging_tensor.LoggingTensorMode",
    }
)


def remove_dispatch_mode(mode: Any) -> None:
    """Remove a dispatch mode from this thread's stack, if it is there, after its enter or exit was interrupted.

    Also restores the flags that torch keeps beside the stack.
    """
    stack = [dispatch_mode_at(i) for i in range(num_dispatch_modes())]
    if any(other is mode for other in stack):
        above = []
        while (top := pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            push_mode(other)
        stack = [other for other in stack if other is not mode]
    _dispatch_names._is_in_torch_dispatch_mode = bool(stack)
    _dispatch_names._is_in_non_infra_torch_dispatch_mode = any(not other.is_infra_mode() for other in stack)
    traced = any(not other.ignore_compile_internals() for other in stack)
    _dispatch_names._is_in_any_mode_without_ignore_compile_internals = traced
    if _set_is_traced is not None:
        _set_is_traced(traced)


def function_modes() -> tuple[Any, ...]:
    """Return this thread's function modes, outermost first."""
    return tuple(_function_mode_at(i) for i in range(num_function_modes()))


@contextmanager
def replaced_function_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    """Run the body under exactly these function modes, including `DeviceContext`.

    The modes are not entered again: they are put on the stack as objects.
    """
    outside = _swap_function_modes(modes)
    device = _default_device()
    _device_names.CURRENT_DEVICE = next((m.device for m in modes if isinstance(m, _device_context)), None)
    try:
        yield
    finally:
        _device_names.CURRENT_DEVICE = device
        _swap_function_modes(outside)


def _swap_function_modes(modes: tuple[Any, ...]) -> tuple[Any, ...]:
    removed = [_pop_function_mode() for _ in range(num_function_modes())]
    for mode in modes:
        _push_function_mode(mode)
    return tuple(reversed(removed))


def is_tracing() -> bool:
    """Whether operators are being traced into a graph (`make_fx`), which runs later with other bytes."""
    return _mode_of_kind(_tracing()) is not None


def below_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch; no mode of this thread sees it, nor the operators that it runs."""
    with without_functions(), without_dispatch():
        return function(*args, **kwargs)
