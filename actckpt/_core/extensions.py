"""The registry of extensions: what libraries unknown to this package need from regions and offloading.

Only methods that an extension overrides are called, so without extensions a region or a saved tensor pays for checking
an empty list. Extensions are called in the order of registration; their contexts exit in the reverse order.

`await_package` registers an extension lazily, once its package is imported: this package imports no others. If creating
the extension raises, every region raises that error until it succeeds or `forget_package` is called.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "Captured",
    "Extension",
    "Tracker",
    "around_regions",
    "await_package",
    "capture",
    "clears_saved",
    "excludes_from_offload",
    "forget_package",
    "lazy_extensions",
    "register",
    "register_lazy_extensions",
    "unregister",
]


class Tracker(Protocol):
    """An object that holds named random states, like the trackers of TransformerEngine, Megatron and DeepSpeed."""

    def get_states(self) -> dict[Any, Any]:
        """Return the states by name: byte tensors, `torch.Generator`s or immutable values."""

    def set_states(self, states: dict[Any, Any], /) -> None:
        """Set these states."""


class Extension:
    """What one library needs from regions and offloading. The methods here do nothing; override what is needed."""

    def capture(self) -> Any:
        """Called before the forward of a region that is rerun.

        Returns:
            The state passed to `forward` and `rerun`; None: nothing to carry for this region.
        """
        return None

    def forward(self, state: Any, /) -> AbstractContextManager[Any]:
        """Return a context for the forward of a region."""
        return nullcontext()

    def rerun(self, state: Any, /) -> AbstractContextManager[Any]:
        """Return a context for a rerun, which may be in another thread than the forward."""
        return nullcontext()

    def allows_early_stop(self, state: Any, /) -> bool:
        """Whether a rerun may stop before the function returns."""
        return True

    def tracker(self) -> Tracker | None:
        """Return a tracker whose random states every rerun restores. Called for each region."""
        return None

    def excludes_from_offload(self, tensor: Tensor, /) -> bool:
        """Whether a tensor must not be offloaded. Called when it is packed, on the current stream."""
        return False

    def clears_saved(self) -> bool:
        """Whether backward may clear the tensor that is being saved; backward then gets an alias."""
        return False


#: All registered extensions.
_registered: list[Extension] = []
#: The registered callables by use; only overridden methods. The C++ extension reads the last two lists.
around_regions: list[Extension] = []
excludes_from_offload: list[Callable[[Tensor], bool]] = []
clears_saved: list[Callable[[], bool]] = []


def register(extension: Extension) -> None:
    """Register `extension`. Registering an equal one again changes nothing."""
    if extension not in _registered:
        _registered.append(extension)
        _write_lists()


def unregister(extension: Extension) -> None:
    """Undo `register`.

    Raises:
        ValueError: `extension` is not registered.
    """
    _registered.remove(extension)
    _write_lists()


def _write_lists() -> None:
    """Write the lists anew, in place."""
    around_regions[:] = [one for one in _registered if _overrides(one, "capture") or _overrides(one, "tracker")]
    excludes_from_offload[:] = [
        one.excludes_from_offload for one in _registered if _overrides(one, "excludes_from_offload")
    ]
    clears_saved[:] = [one.clears_saved for one in _registered if _overrides(one, "clears_saved")]


def _overrides(extension: Extension, method: str) -> bool:
    return getattr(type(extension), method) is not getattr(Extension, method)


#: By name of a package that is not imported yet: the function that creates the extension.
lazy_extensions: dict[str, Callable[[], Extension]] = {}


def await_package(name: str, make: Callable[[], Extension]) -> None:
    """Register what `make` returns, at the first region after someone else has imported the package `name`."""
    lazy_extensions[name] = make


def forget_package(name: str) -> None:
    """Undo `await_package`, if the package is not imported yet."""
    lazy_extensions.pop(name, None)


def register_lazy_extensions() -> None:
    """Register the extensions of packages that have been imported since the last call."""
    for name in tuple(lazy_extensions):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            register(lazy_extensions[name]())
            lazy_extensions.pop(name, None)


class Captured:
    """The states that extensions carry through one region."""

    __slots__ = ("_states",)

    def __init__(self, states: list[tuple[Extension, Any]]) -> None:
        self._states = states

    def allows_early_stop(self) -> bool:
        """Whether all of them allow it."""
        return all(extension.allows_early_stop(state) for extension, state in self._states)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the body as the forward."""
        with ExitStack() as stack:
            for extension, state in self._states:
                stack.enter_context(extension.forward(state))
            yield

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Run the body as a rerun."""
        with ExitStack() as stack:
            for extension, state in self._states:
                stack.enter_context(extension.rerun(state))
            yield


def capture() -> Captured | None:
    """Return the states of extensions for a region that starts now; None: there are none."""
    if not around_regions:
        return None
    states = [(extension, extension.capture()) for extension in around_regions]
    states = [(extension, state) for extension, state in states if state is not None]
    return Captured(states) if states else None
