"""The one registry of extensions: what libraries that are not known here need of regions and of offloading.

NOTE [ Extensions ]

Rule 1. An extension overrides the methods that it needs. Only those are called: a region, and a saved tensor, of a
        process without such extensions costs the look at an empty list.
Rule 2. Extensions are asked in the order in which they were registered; their contexts end in the reverse order.
Rule 3. An extension for a package that is not loaded yet waits for it (`await_package`): importing this package
        imports no other one. What it raises when it is made is raised at every region, until it succeeds or is
        forgotten.
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
    "forget_package",
    "lazy_extensions",
    "must_stay",
    "register",
    "register_lazy_extensions",
    "unregister",
]


class Tracker(Protocol):
    """What holds named random states: TransformerEngine's, Megatron's and DeepSpeed's trackers do."""

    def get_states(self) -> dict[Any, Any]:
        """Return the states by name: byte tensors, `torch.Generator`s or immutable values."""

    def set_states(self, states: dict[Any, Any], /) -> None:
        """Take over these states."""


class Extension:
    """What one library needs of regions and of offloading. Every method here does nothing: override what is needed."""

    def capture(self) -> Any:
        """Called before the forward of a region that is rerun.

        Returns:
            What `forward` and `rerun` are given; None: nothing to carry for this region.
        """
        return None

    def forward(self, state: Any, /) -> AbstractContextManager[Any]:
        """Return a context for the forward of a region."""
        return nullcontext()

    def rerun(self, state: Any, /) -> AbstractContextManager[Any]:
        """Return a context for a rerun, which may be in another thread than the forward."""
        return nullcontext()

    def allows_early_stop(self, state: Any, /) -> bool:
        """Whether a rerun may end before the function does."""
        return True

    def tracker(self) -> Tracker | None:
        """Return a tracker whose random states every rerun restores. Called at each region."""
        return None

    def must_stay(self, tensor: Tensor, /) -> bool:
        """Whether a tensor must not be moved. Called as it is packed, on the stream that is current there."""
        return False

    def clears_saved(self) -> bool:
        """Whether backward may clear what it is given of the tensor that is being saved: it then gets an alias."""
        return False


#: All that are registered.
_registered: list[Extension] = []
#: Of these, what each place has to ask (Rule 1). The extension module holds the last two.
around_regions: list[Extension] = []
must_stay: list[Callable[[Tensor], bool]] = []
clears_saved: list[Callable[[], bool]] = []


def register(extension: Extension) -> None:
    """Ask `extension` from now on. One that is equal to a registered one changes nothing."""
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
    must_stay[:] = [one.must_stay for one in _registered if _overrides(one, "must_stay")]
    clears_saved[:] = [one.clears_saved for one in _registered if _overrides(one, "clears_saved")]


def _overrides(extension: Extension, method: str) -> bool:
    return getattr(type(extension), method) is not getattr(Extension, method)


#: Packages that are not loaded yet, by name: what makes the extension for each.
lazy_extensions: dict[str, Callable[[], Extension]] = {}


def await_package(name: str, make: Callable[[], Extension]) -> None:
    """Register what `make` returns, at the first region after the package `name` has been loaded by somebody else."""
    lazy_extensions[name] = make


def forget_package(name: str) -> None:
    """Undo `await_package`, if the package is not imported yet."""
    lazy_extensions.pop(name, None)


def register_lazy_extensions() -> None:
    """Register the extensions of packages that have been loaded since (Rule 3)."""
    for name in tuple(lazy_extensions):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            register(lazy_extensions[name]())
            lazy_extensions.pop(name, None)


class Captured:
    """What extensions carry through one region."""

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
    """Return what extensions carry through a region that begins now; None: nothing."""
    if not around_regions:
        return None
    states = [(extension, extension.capture()) for extension in around_regions]
    states = [(extension, state) for extension, state in states if state is not None]
    return Captured(states) if states else None
