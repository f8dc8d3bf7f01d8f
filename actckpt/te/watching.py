"""Wraps functions of TransformerEngine to notify a watcher. `internals.py` selects them."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Calls", "Watcher"]


class Watcher(Protocol):
    """Notified of TransformerEngine's calls."""

    @property
    def is_rerunning(self) -> bool:
        """Whether a rerun is active."""

    def nested(self) -> Callable[[bool], None] | None:
        """Called before a te.checkpoint's forward or recompute.

        Returns:
            A function to call with True on entry and with False on exit, or None.
        """

    def module_begins(self, module: torch.nn.Module, inp: Tensor) -> None:
        """Called before a module's forward checks the autocast."""

    def ops_begin(self, fuser: Any, ops: list[Any]) -> None:
        """Called before fused te.ops."""

    def cast_begins(self, tensor: Tensor) -> None:
        """Called before a quantized tensor is written in place."""


class Calls:
    """The functions wrapped for one watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._originals: list[tuple[Any, str, Any]] = []

    def tell_of_recomputes(self, context: Any) -> None:
        """Notify of entering and leaving TransformerEngine's recompute regions; leaving one clears the flags."""
        entered: list[Callable[[bool], None] | None] = []
        enter, leave = context.__enter__, context.__exit__

        def watched_enter(self_: Any) -> Any:
            done = self._watcher.nested()
            entered.append(done)
            result = enter(self_)
            if done is not None:
                done(True)
            return result

        def watched_exit(self_: Any, *details: Any) -> Any:
            try:
                return leave(self_, *details)
            finally:
                done = entered.pop() if entered else None
                if done is not None:
                    done(False)

        self._replace(context, "__enter__", watched_enter)
        self._replace(context, "__exit__", watched_exit)

    def tell_before(self, owner: Any, name: str, tell: Callable[[Any, Any], None]) -> None:
        """Call `tell` with the object and the first argument before a method."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(self_: Any, *args: Any, **kwargs: Any) -> Any:
            tell(self_, next(iter((*args, *kwargs.values()))))
            return original(self_, *args, **kwargs)

        self._replace(owner, name, watched)

    def skip_in_reruns(self, owner: Any, name: str) -> None:
        """Make a method do nothing during reruns."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(self_: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._watcher.is_rerunning else original(self_, *args, **kwargs)

        self._replace(owner, name, watched)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def undo(self) -> None:
        """Restore everything."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals = []
