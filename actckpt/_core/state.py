"""Global state of a region, restored for its reruns.

This covers autocast of the CPU and the accelerator with dtype and cache flag, function modes (the default device is
one), dispatch modes that may change results (NOTE [ Modes ]), the current device, and inference mode. Settings that
change operator results are in `numerics`, random state is in `random_state`. Extensions carry state unknown here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from actckpt import _C
from actckpt._core import devices, modes, numerics, torch_private

__all__ = ["GlobalState", "capture", "restored", "with_details", "without_autocast"]

GlobalState = tuple[Any, ...]


#: Getters that C++ calls at every region (csrc/rerun/region.cpp). If one of the first two returns something, it calls
#: `with_details`.
GETTERS: tuple[Callable[[], Any], ...] = (
    torch_private.any_autocast_enabled,
    torch_private.num_function_modes,
    _C.unknown_modes,
    devices.current_index,
    _C.numerics,
)


def capture() -> GlobalState:
    """Return the global state that reruns restore, as a comparable tuple."""
    return _C.capture_state()


def with_details(found: GlobalState) -> GlobalState:
    """Return what the getters returned, with the settings of autocast and the function modes; called from C++."""
    return (*found, _autocast_state() if found[0] else None, torch_private.function_modes())


@contextmanager
def restored(state: GlobalState, outside: GlobalState) -> Iterator[None]:
    """Run the body under `state`, captured in forward; `outside` is the current state."""
    with ExitStack() as stack:
        for entry in _differences(state, outside):
            stack.enter_context(entry)
        yield


def _differences(state: GlobalState, outside: GlobalState) -> Iterator[AbstractContextManager[Any]]:
    count = len(GETTERS)
    _, _, dispatch_modes, device, settings = state[:count]
    _, _, dispatch_modes_outside, device_outside, settings_outside = outside[:count]
    autocast, function_modes = state[count:] or (None, ())
    autocast_outside, function_modes_outside = outside[count:] or (None, ())
    if torch.is_inference_mode_enabled():  # it saves nothing, so it was off in forward
        yield torch.inference_mode(False)
    if settings != settings_outside:
        yield numerics.restored(settings)
    if device is not None and device != device_outside:
        yield _at_index(device)
    if autocast != autocast_outside:
        yield _autocast(autocast)
    if dispatch_modes != dispatch_modes_outside:  # restoring the rest must not run through the user's modes
        yield modes.replaced(dispatch_modes)
    if function_modes != function_modes_outside:
        yield torch_private.replaced_function_modes(function_modes)


def _at_index(device: int) -> AbstractContextManager[Any]:
    accelerator = devices.current()
    assert accelerator is not None
    return accelerator.at_index(device)


def _autocast_of(device_type: str) -> tuple[str, bool, torch.dtype]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _autocast_state() -> tuple[Any, ...] | None:
    states = tuple(_autocast_of(device_type) for device_type in devices.autocast_types())
    if not any(enabled for _, enabled, _ in states):
        return None
    return (*states, torch.is_autocast_cache_enabled())


@contextmanager
def _autocast(state: tuple[Any, ...] | None) -> Iterator[None]:
    """Enter torch.autocast itself: it also counts its nesting and clears its cache."""
    if state is None:
        with without_autocast():
            yield
        return
    *states, cache = state
    with ExitStack() as stack:
        for of_device in states:
            device_type, enabled, dtype = of_device
            if device_type == "cpu" or of_device != _autocast_of(device_type):  # a device may have no autocast
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache))
        yield


@contextmanager
def without_autocast(*, keeps_cache: bool = False) -> Iterator[None]:
    """Run the body without autocast, for the CPU and the accelerator.

    Args:
        keeps_cache: do not clear autocast's cache at the end. All threads share it. A thread of autograd has the
            settings of its caller, but counts no nesting: torch would clear the cache that the caller still uses.
    """
    with ExitStack() as stack:
        if keeps_cache:
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
        for device_type in devices.autocast_types():
            if device_type == "cpu" or torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
