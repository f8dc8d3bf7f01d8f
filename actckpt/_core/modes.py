"""The program's dispatch modes: which ones may change operator results, and how to work without those.

NOTE [ Modes ]

A mode entered before a region lies below its recorder: it sees each operator after the recorder, and may return
another result. So what is recorded above such a mode is never replayed. Replay, and all other work on tensors behind
the program's back, runs without such modes. A rerun runs under exactly the modes of its forward, put back on the stack
as objects, not entered again.

Some modes are known to change no results: those of this package, of torch (`torch_private`), and those that
`configure(observers=[...])` names. They stay on the stack, as does torch's own infrastructure (fake tensors, tracing).
The class that defines the handler counts: a subclass with its own handler is another mode. For any other mode it cannot
be decided: it may start to change results at any operator, or write to a result with a kernel that no dispatcher sees.

Blocks are timed without this package's own modes, since they slow down every operator.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from actckpt import config
from actckpt._core import simulated, torch_private
from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText

__all__ = ["BELOW", "put_back", "replaced", "take_off", "unknown", "warn", "why_kept", "without_own"]

Modes = tuple[Any, ...]

#: Prefix of the reason why a value made below a mode is kept.
BELOW = "made below the dispatch mode"
#: Mode types that a warning has named.
_warned: "weakref.WeakSet[type]" = weakref.WeakSet()


@lru_cache(maxsize=256)
def _only_observes(kind: Any, observers: tuple[type, ...]) -> bool:
    if kind.is_infra_mode():
        return True
    owner = next(base for base in kind.__mro__ if "__torch_dispatch__" in vars(base))
    if kind in observers or owner in observers or _is_own(owner):
        return True
    return f"{owner.__module__}.{owner.__qualname__}" in torch_private.OBSERVING_MODES


def _is_own(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "actckpt"


def unknown() -> Modes:
    """Return the active modes of this thread that may change results, outermost first."""
    count = torch_private.num_dispatch_modes()
    if not count:
        return ()
    observers = config.settings().observers
    active = [torch_private.dispatch_mode_at(place) for place in range(count)]
    kinds: list[Any] = [type(mode) for mode in active]
    return tuple([mode for mode, kind in zip(active, kinds, strict=True) if not _only_observes(kind, observers)])


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def why_kept(mode: Any) -> str:
    """Return why a value made below a mode is kept, for reports."""
    return (
        f"{BELOW} {_name_of(type(mode))}, which may change results; if it does not, name it in configure(observers=...)"
    )


_MAY_CHANGE_RESULTS = WarningText(
    "The dispatch mode {mode} is active around a region and may change what operators return. The region keeps what "
    "its policy would recompute, so that gradients are right.",
    "If the mode changes no results, pass actckpt.configure(observers=[{name}]). Or use checkpoint(fn, ...) without a "
    "policy, which runs the function again below the mode.",
    per="type of mode",
)


def warn(modes: Modes) -> None:
    """Warn, once per type, of modes below a region's recorder."""
    for kind in dict.fromkeys(map(type, modes)):
        if kind not in _warned:
            _warned.add(kind)
            warn_user(_MAY_CHANGE_RESULTS, mode=_name_of(kind), name=kind.__name__)


def take_off() -> Modes:
    """Remove the modes that may change results from the stack; returns the argument for `put_back`."""
    return _exchange(())


def put_back(modes: Modes) -> None:
    """Undo `take_off`."""
    _put(modes)


@contextmanager
def replaced(modes: Modes) -> Iterator[None]:
    """Run the body with `modes` instead of the active modes that may change results. They are not entered again."""
    outside = _exchange(modes)
    try:
        yield
    finally:
        _put(outside)


@contextmanager
def without_own() -> Iterator[None]:
    """Run the body without this package's own active modes, except on a simulated device, which consists of them."""
    active = _active()
    _put(tuple([mode for mode in active if simulated.is_simulated() or not _is_own(type(mode))]))
    try:
        yield
    finally:
        _put(active)


def _exchange(modes: Modes) -> Modes:
    """Replace the modes that may change results by `modes`; returns those that were active."""
    unwanted = unknown()
    active = _active()
    _put((*modes, *(mode for mode in active if not any(mode is other for other in unwanted))))
    return active


def _active() -> Modes:
    """Return the active modes of this thread, without torch's infrastructure."""
    modes = map(torch_private.dispatch_mode_at, range(torch_private.num_dispatch_modes()))
    return tuple([mode for mode in modes if not mode.is_infra_mode()])


def _put(modes: Modes) -> None:
    for _ in _active():
        torch_private.pop_dispatch_mode()
    for mode in modes:
        torch_private.push_dispatch_mode(mode)
