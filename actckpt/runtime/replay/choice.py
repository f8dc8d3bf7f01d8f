"""What a policy decides, as the recorder asks it."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from actckpt.action import Action, SavedTensorInfo

__all__ = ["Choice"]

#: Torch does not ask policies for these either.
_IGNORED: frozenset[Any] = frozenset(torch.utils.checkpoint.SAC_IGNORED_OPS)


class Choice:
    """One policy. Exactly one of the three ways to decide is in use.

    Args:
        actions: by overload of an operator; `default` for all others.
        after_call: asked once for every operator, right after it ran, with the operator, its arguments, its
            keywords and its result.
        for_value: asked once per value, when it is saved for the first time.
    """

    __slots__ = ("_actions", "_after_call", "_default", "for_value")

    def __init__(
        self,
        actions: dict[Any, Action] | None = None,
        default: Action | None = None,
        *,
        after_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Action] | None = None,
        for_value: Callable[[SavedTensorInfo], Action] | None = None,
    ) -> None:
        self._actions = actions or {}
        self._default = default
        self._after_call = after_call
        self.for_value = for_value

    @property
    def asks_calls(self) -> bool:
        """Whether every operator must be reported with `after_call`."""
        return self._after_call is not None

    def of(self, func: Any) -> Action | None:
        """Return the action for what an overload makes, None if that is not known from the overload alone."""
        return self._actions.get(func, self._default)

    def after_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> Action:
        """Ask for one call of an operator."""
        assert self._after_call is not None
        if func in _IGNORED:
            return Action.RECOMPUTE
        return self._after_call(func, args, kwargs or {}, result)

    @property
    def always(self) -> Action | None:
        """The action for all values, None if they may differ."""
        return None if self._actions else self._default
