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
        is_per_operator: whether `default` goes by operator too, also where there are no `actions`: inputs stay, and
            values of any size move.
    """

    __slots__ = ("_after_call", "_is_per_operator", "actions_by_id", "asks_calls", "default", "for_value", "operators")

    def __init__(
        self,
        actions: dict[Any, Action] | None = None,
        default: Action | None = None,
        *,
        after_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Action] | None = None,
        for_value: Callable[[SavedTensorInfo], Action] | None = None,
        is_per_operator: bool = False,
    ) -> None:
        #: By id() of the overload; torch keeps each as long as it lives, and hashes them in Python.
        self.actions_by_id: dict[int, Action] = {id(overload): action for overload, action in (actions or {}).items()}
        #: Those of `actions`, whose ids stay theirs.
        self.operators: tuple[Any, ...] = tuple(actions or ())
        self.default: Action | None = default
        self._is_per_operator = is_per_operator
        self._after_call = after_call
        #: Whether every operator must be reported with `after_call`.
        self.asks_calls: bool = after_call is not None
        self.for_value: Callable[[SavedTensorInfo], Action] | None = for_value

    def of(self, func: Any) -> Action | None:
        """Return the action for what an overload makes, None if that is not known from the overload alone."""
        return self.actions_by_id.get(id(func), self.default)

    def after_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> Action:
        """Ask for one call of an operator."""
        assert self._after_call is not None
        if func in _IGNORED:
            return Action.RECOMPUTE
        return self._after_call(func, args, kwargs or {}, result)

    @property
    def always(self) -> Action | None:
        """The action for all values, None if they may differ."""
        if self.actions_by_id or (self._is_per_operator and self.default is not Action.KEEP):
            return None
        return self.default
