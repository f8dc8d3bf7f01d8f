"""Global state of a region: what a rerun finds as the forward found it.

Covered here: autocast of the CPU and the accelerator with dtype and cache flag, function modes (the default device is
one), dispatch modes that may change results (NOTE [ Modes ]), the current device, inference mode. Settings that change
which numbers operators compute are in `numerics`, random state is in `random_state`. State that is not known here is
carried by extensions (NOTE [ Extensions ]).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch

from actckpt import _C
from actckpt._core import modes, numerics, torch_private

__all__ = ["GlobalState", "capture", "restored"]

GlobalState = tuple[Any, ...]


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


#: What the extension asks at every region. Where one of the first two is set, `capture` adds details.
GETTERS: tuple[Callable[[], Any], ...] = (
    torch_private.any_autocast_enabled,
    torch_private.num_function_modes,
    _C.unknown_modes,
    _current_device if torch.backends.cuda.is_built() else _C.none,
    _C.numerics,
)


def capture() -> GlobalState:
    """Return the global state that reruns restore, as a tuple that can be compared."""
    quick = _C.capture_state()
    if quick[0] or quick[1]:
        return (*quick, _autocast_state() if quick[0] else None, torch_private.function_modes())
    return quick


@contextmanager
def restored(state: GlobalState, outside: GlobalState) -> Iterator[None]:
    """Run the body under `state`, captured in forward, where `outside` is the state now."""
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
    if torch.is_inference_mode_enabled():  # nothing is saved in it, so it was off in forward
        yield torch.inference_mode(False)
    if settings != settings_outside:
        yield numerics.restored(settings)
    if device is not None and device != device_outside:
        yield torch.cuda.device(device)
    if autocast != autocast_outside:
        yield _autocast(autocast)
    if dispatch_modes != dispatch_modes_outside:  # restoring the rest must not run through the user's modes
        yield modes.replaced(dispatch_modes)
    if function_modes != function_modes_outside:
        yield torch_private.replaced_function_modes(function_modes)


@lru_cache(maxsize=1)
def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _autocast_state() -> tuple[Any, ...] | None:
    devices = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _autocast_devices()
    )
    if not any(enabled for _, enabled, _ in devices):
        return None
    return (*devices, torch.is_autocast_cache_enabled())


@contextmanager
def _autocast(state: tuple[Any, ...] | None) -> Iterator[None]:
    """Enter torch.autocast itself: it also keeps count of its nesting and clears its cache."""
    with ExitStack() as stack:
        if state is None:
            for device in _autocast_devices():
                stack.enter_context(torch.autocast(device, enabled=False))
        else:
            *devices, cache = state
            for device, enabled, dtype in devices:
                stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype, cache_enabled=cache))
        yield
