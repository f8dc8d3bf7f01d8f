"""`region`: a block of code whose saved tensors a policy keeps, recomputes or offloads."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

import torch

from actckpt._C import all_or_nothing
from actckpt._core import torch_private
from actckpt._core.functions import check_runs_when_called
from actckpt._core.region_report import Figures, Report, explained
from actckpt._replay.active_region import OpenRegion
from actckpt._replay.call_sites import caller_of
from actckpt._replay.choice import Choice
from actckpt._replay.named_operators import Matches
from actckpt.action import Action
from actckpt.errors import StillOpenError
from actckpt.policies import Policy, choice_of

__all__ = ["region"]

_IN_COMPILED_CODE = (
    "actckpt.region records operators, which a compiled function does not show it: it breaks the graph here. Use "
    "actckpt.checkpoint with a policy, which the compiler follows, or open the region around the compiled function."
)
_NOT_OPEN = "Not recorded: the region was not opened yet, or where grad mode was off, or in torch.export."
#: The namespace of contextlib: frames of its decorators lie between a `with` statement and a region.
_CONTEXTLIB = vars(contextlib)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class region:  # noqa: N801 - used as a function
    """Decide per saved tensor of a block of code: keep it, recompute it, or offload it.

    The operators of the block are recorded, unless the policy is to keep or to offload everything: that needs no
    record, and its report says so (with `record=True` `"keep"` records too). Backward recomputes dropped tensors by
    executing the fewest operators again, without calling any Python code twice. Also a decorator: `@actckpt.region()`.

    Args:
        policy: `"keep"`, `"recompute"`, `"offload"`, `"prefer_offload"` or an `Action`, for all values; a list of
            operators to keep, the rest is recomputed, or the name of such a list (`"attention"`, `"matmuls"`,
            `"dots_with_no_batch_dims"`); a dict of actions by `Place`, its text or a selector
            (`"layers.*.mlp::aten.mm"`), the rest is recomputed; `policies.PerOp`; a function that takes a
            `SavedTensorInfo` and returns an `Action`; or a policy function of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        record: record the operators under `"keep"` too, so that the report shows what autograd saves.
    Raises:
        ValueError: it is not a policy, `record` does not apply to it, or it names an operator that does not exist.
        TypeError: a region is called like a function: `@actckpt.region` without parentheses took the decorated function
            for a policy.

    Example::

        >>> import torch, actckpt
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> with actckpt.region([torch.ops.aten.addmm]):
        ...     y = layer(torch.randn(2, 4))
        >>> y.sum().backward()
    """

    def __init__(self, policy: Policy = "recompute", *, record: bool = False) -> None:
        if torch.compiler.is_compiling():
            torch_private.graph_break(_IN_COMPILED_CODE)
        self._policy = policy
        self._record = record
        self._choice = choice_of(policy)
        if record:
            self._choice = _recorded(self._choice)
        self._open: OpenRegion | None = None
        #: Identifies the decorated function; None: the location of the `with` statement is used.
        self._caller: Any = None
        self._figures: Figures | None = None
        self._note = _NOT_OPEN
        self._matches: Matches | None = None

    def __repr__(self) -> str:
        policy = getattr(self._policy, "__qualname__", None) or repr(self._policy)
        return f"<actckpt.region({policy}){', open' if self._open is not None else ''}>"

    def __call__(self, func: _Function = None, /, *more: Any, **keywords: Any) -> _Function:  # type: ignore[assignment]
        """Return a function that runs in a region with this policy each time: `region(policy)(function)`."""
        if more or keywords or not callable(func):
            name = getattr(self._policy, "__qualname__", repr(self._policy))
            raise TypeError(
                f"actckpt.region({name}) was called, and not with one function to decorate. If {name} is the function "
                "to run, rather than a policy: decorate it with @actckpt.region(), with parentheses."
            )
        check_runs_when_called(func, "region")

        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            inner = region(self._policy, record=self._record)
            inner._caller = caller_of(func, args, kwargs)
            with inner:
                return func(*args, **kwargs)

        return run  # type: ignore[return-value]

    @torch_private.untraced
    def _enter(self) -> region:
        if self._open is not None:
            raise StillOpenError("This region is open already. Make another one with actckpt.region(...).")
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            self._figures = Figures()
            self._open = OpenRegion(self._choice, self._caller or _place(sys._getframe(1)), self._figures)
            self._open.__enter__()
            self._note = self._open.why_not_recorded()
            self._matches = self._open.matches
        return self

    @torch_private.untraced
    def _exit(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._open is not None:
            self._open.__exit__(kind)
            self._open = None

    @torch_private.untraced
    def _unwind(self, error: BaseException) -> None:
        if self._open is not None and not isinstance(error, StillOpenError):
            self._open.unwind(error)
            self._open = None

    __enter__: ClassVar[Callable[[Any], region]] = all_or_nothing(_enter, _unwind)
    __exit__: ClassVar[Callable[..., None]] = all_or_nothing(_exit, _unwind)

    @overload
    def report(self) -> Report: ...

    @overload
    def report(self, *, explain: torch.Tensor) -> str: ...

    def report(self, *, explain: torch.Tensor | None = None) -> Report | str:
        """Return what became of the values that autograd saved, by operator and module.

        Args:
            explain: a tensor of the region. The result is then a text: why it got its action.

        Example::

            >>> import torch, actckpt
            >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
            >>> with actckpt.region() as r:
            ...     y = layer(torch.randn(2, 4))
            >>> r.report().recomputed_bytes
            64
        """
        if explain is not None and not isinstance(explain, torch.Tensor):
            raise TypeError(
                f"report: explain={explain!r} is a {type(explain).__name__}. It takes a tensor of the region."
            )
        figures = self._figures or Figures()
        if explain is None:
            return figures.report(self._note, self._matches.idle() if self._matches is not None else ())
        entries = figures.entries
        return explained(entries, explain) if entries or not self._note else self._note


def _recorded(choice: Choice) -> Choice:
    """Return a policy in a form that records."""
    if choice.always is Action.OFFLOAD:
        raise ValueError(
            "region: record=True does not go with policy='offload', which moves what it sees. Pass "
            "actckpt.policies.PerOp({}, default='offload'), which is recorded."
        )
    return Choice(for_value=lambda info: Action.KEEP) if choice.always is Action.KEEP else choice


def _place(frame: types.FrameType) -> tuple[Any, ...]:
    """Return code and line of a `with` statement; if contextlib runs it, also those of the enclosing one."""
    place: tuple[Any, ...] = ()
    outer: types.FrameType | None = frame
    while outer is not None:
        if outer.f_globals is not _CONTEXTLIB:
            place += outer.f_code, outer.f_lineno
            if outer.f_back is None or outer.f_back.f_globals is not _CONTEXTLIB:
                break
        outer = outer.f_back
    return place
