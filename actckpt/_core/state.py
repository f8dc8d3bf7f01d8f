"""Global state of a region: what a rerun finds as the forward found it.

Covered here: autocast of the CPU and the accelerator with dtype and cache flag, function modes (the default device is
one), dispatch modes that may change results (NOTE [ Modes ]), the current device, inference mode. Settings that change
which numbers operators compute are in `numerics`, random state is in `rng`. State that this file does not know comes
from providers registered with it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch

from actckpt import _C
from actckpt._core import modes, numerics, torch_private

__all__ = [
    "GlobalState",
    "StateProvider",
    "await_package",
    "capture",
    "register_awaited",
    "register_state_provider",
    "unregister_state_provider",
]

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


class StateProvider(Protocol):
    """Carries state that the runtime does not know from a region's forward into its reruns."""

    def capture(self) -> Any:
        """Called before the forward. None: nothing to carry for this region."""

    def forward(self, state: Any, /) -> AbstractContextManager[Any]:
        """Entered around the forward."""

    def rerun(self, state: Any, /) -> AbstractContextManager[Any]:
        """Entered around each rerun, whose thread may be another one."""

    def allows_early_stop(self, state: Any, /) -> bool:
        """Whether a rerun may end before the function does."""


#: What `register_state_provider` was given.
registered: list[StateProvider] = []


def register_state_provider(provider: StateProvider) -> None:
    """Ask `provider` at every region from now on."""
    if provider not in registered:
        registered.append(provider)


def unregister_state_provider(provider: StateProvider) -> None:
    """Undo `register_state_provider`.

    Raises:
        ValueError: `provider` is not registered.
    """
    registered.remove(provider)


#: Packages that are not loaded yet, by name: what to call once they are.
awaited: dict[str, Callable[[], None]] = {}


def await_package(name: str, register: Callable[[], None]) -> None:
    """Call `register` at the first region after the package `name` has been loaded by somebody else."""
    awaited[name] = register


def register_awaited() -> None:
    """Call what waits for packages that have been loaded since; what raises stays, to raise again."""
    for name in tuple(awaited):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            awaited[name]()
            awaited.pop(name, None)


class ProvidedState:
    """What the registered providers captured for one region."""

    __slots__ = ("_captured",)

    def __init__(self) -> None:
        captured = [(provider, provider.capture()) for provider in registered]
        self._captured = [(provider, state) for provider, state in captured if state is not None]

    def __bool__(self) -> bool:
        return bool(self._captured)

    def allows_early_stop(self) -> bool:
        return all(provider.allows_early_stop(state) for provider, state in self._captured)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for provider, state in self._captured:
                stack.enter_context(provider.forward(state))
            yield

    @contextmanager
    def rerun(self) -> Iterator[None]:
        with ExitStack() as stack:
            for provider, state in self._captured:
                stack.enter_context(provider.rerun(state))
            yield


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
