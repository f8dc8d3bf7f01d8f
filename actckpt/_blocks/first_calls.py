"""First calls of blocks: which operators give other results when a rerun calls them again.

Dispatches to experts may assign rows in another order each time, even with the same arguments. So until a rerun of a
block has ended, its calls hold the results of operators outside of aten and of collectives. The rerun calls these
operators, compares, and returns the results that the forward had. So this step has the right gradients. An operator
whose results differ by more than rounding is added to `configure(opaque=[...])`, with a warning. From then on, `apply`
replays blocks, and keeps its results.

Not held are: anything on one of several ranks, which would repeat other collectives than the others; results of
operators that write to arguments or return views of them; subclasses of tensors; tensors that the block overwrites; and
what kernels write that no operator calls. The audit of reruns raises where these differ.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from actckpt import config
from actckpt._C import Paused
from actckpt._core import random_state, ranks, torch_private
from actckpt._core.checksums import are_close_elements
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.sites import warn_user
from actckpt._core.storages import storages_of, tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt._options import CheckpointOptions
from actckpt._replay.operators import Operator, operator_of
from actckpt._rerun.audit import Digest, Filling, depends_on_memory, is_auditing
from actckpt.errors import RerunMismatchError
from actckpt.policies import PerOp

__all__ = ["FirstCalls"]

#: Maximum number of calls whose graphs are alive that hold results, while no rerun ends.
_MOST_CALLS = 16
_NOT_REPEATABLE = WarningText(
    "apply: in {block}, {operator} returns other values when it runs again with the same arguments. Its first results "
    "were used. From now on blocks are replayed, and its results are kept.",
    'actckpt.configure(opaque=["{operator}"]) before the first step does the same.',
    per="operator",
)
_NOT_HELD = (
    "apply: in {block}, {operator} returns other values when it runs again with the same arguments, and more than "
    "{most} calls came before the first backward: the gradients of the later ones would be wrong. Call "
    'actckpt.configure(opaque=["{operator}"]) before the first step.'
)


class FirstCalls:
    """How reruns of one block run: whether calls hold results, or are replayed."""

    def __init__(self, block: str) -> None:
        self.block = block
        self._num_left = _MOST_CALLS if torch_private.runs_compiled_below_modes else 0
        #: Whether a rerun has ended; and whether calls before that held nothing, although others did.
        self._is_over, self._has_unheld = not self._num_left, False

    def changed(self, options: CheckpointOptions, *, may_hold: bool) -> CheckpointOptions:
        """Return the options of the next call, which would be rerun.

        Args:
            may_hold: whether it may hold results; false with a budget, which would count them.
        """
        if config.settings().opaque:  # a rerun would run again what is not repeatable
            return options._replace(policy=PerOp({}))
        is_debugged = options.debug or torch_private.forced_by_context()[1]
        is_usual = options.preserve_rng_state and options.determinism_check == "default" and not is_debugged
        if self._is_over or not may_hold or not is_usual or options.context_fn is not noop_context_fn:
            return options
        if torch.compiler.is_compiling() or not is_auditing() or ranks.has_others():
            return options
        if not self._num_left:
            self._has_unheld = True
            return options
        self._num_left -= 1
        return options._replace(policy=None, context_fn=self._contexts)

    def _contexts(self) -> tuple[_Holding, _Giving]:
        calls: list[_Call | None] = []
        giving = _Giving(calls, self)
        weakref.finalize(giving, self._gone).atexit = False
        return _Holding(calls), giving

    def _gone(self) -> None:
        """The graph of a call is gone, perhaps without a backward."""
        self._num_left += 1

    def end(self, different: list[str]) -> None:
        """A rerun has ended.

        Args:
            different: names of the operators whose results differed.
        """
        self._is_over = True
        if different and self._has_unheld:
            raise RerunMismatchError(_NOT_HELD.format(block=repr(self.block), operator=different[0], most=_MOST_CALLS))
        for name in dict.fromkeys(different):
            opaque = config.settings().opaque
            if name not in opaque:
                config.configure(opaque=[*opaque, name])
                warn_user(_NOT_REPEATABLE, block=repr(self.block), operator=name)


class _Arguments(NamedTuple):
    """What tells calls of an operator from each other."""

    plain: list[Any]
    digests: list[Digest | None]

    @classmethod
    def of(cls, arguments: Any) -> _Arguments:
        args, kwargs = arguments
        plain = [each for each in (*args, *(kwargs or {}).items()) if not isinstance(each, (Tensor, list, tuple))]
        return cls(plain, [Digest.of(tensor) for tensor in tensors_in([args, kwargs or {}])])

    def are_same(self, other: _Arguments) -> bool:
        """Return whether they are the same, but for rounding. Waits for the device."""
        if self.plain != other.plain or len(self.digests) != len(other.digests):
            return False
        pairs = zip(self.digests, other.digests, strict=True)
        return all(
            one is other if one is None or other is None else one.shape == other.shape and one.is_same(other)
            for one, other in pairs
        )


class _Call(NamedTuple):
    """What an operator returned, and for which arguments."""

    operator: Any
    arguments: _Arguments
    results: list[Tensor]
    digests: list[Digest]

    def is_unchanged(self) -> bool:
        """Return whether nothing has written to the results. Waits for the device."""
        pairs = zip(self.digests, map(Digest.of, self.results), strict=True)
        return all(again is not None and before.has_same_bits(again) for before, again in pairs)

    def is_repeated_by(self, results: list[Tensor], run: Callable[[], Any]) -> bool:
        """Return whether other results are the same, but for rounding and for memory that the operator never writes.

        Args:
            run: runs the operator again.
        """
        again = self._digests_of(results)
        if again is None:
            return False
        pairs = zip(self.results, results, strict=True)
        with Paused():
            different = [index for index, pair in enumerate(pairs) if not are_close_elements(*pair)]
        if not different:
            return True
        states = random_state.capture(random_state.generators_of_region(result.device for result in results))
        filled = []
        for _ in range(3):
            with Filling(), random_state.swapped_in(states):  # type: ignore[no-untyped-call]
                filled.append(self._digests_of(_tensors(run())))
        runs = [digests for digests in filled if digests is not None]
        return len(runs) == len(filled) and all(
            depends_on_memory(*(digests[index] for digests in (*runs, self.digests, again))) for index in different
        )

    def _digests_of(self, results: list[Tensor]) -> list[Digest] | None:
        """Return digests of other results, None if a shape or dtype differs."""
        if [(one.shape, one.dtype) for one in self.results] != [(other.shape, other.dtype) for other in results]:
            return None
        digests = [Digest.of(result, before) for result, before in zip(results, self.digests, strict=True)]
        found = [digest for digest in digests if digest is not None]
        return found if len(found) == len(digests) else self.digests  # without memory for a digest, nothing is found


class _Holding(ObservingMode):
    """Holds results of operators in a forward."""

    supports_higher_order_operators = True

    def __init__(self, calls: list[_Call | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _may_differ(func):
            self._calls.append(_held(func, result, (args, kwargs)))
        return result


class _Giving(ObservingMode):
    """Compares results of operators in a rerun with those of the forward, and returns the latter."""

    supports_higher_order_operators = True

    def __init__(self, calls: list[_Call | None], first_calls: FirstCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._first_calls = calls, first_calls

    def __enter__(self) -> Any:
        self._number = 0
        #: Names of operators whose results differ.
        self._different: list[str] = []
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._first_calls.end(self._different)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = functools.partial(func, *args, **(kwargs or {}))
        result = run()
        if not _may_differ(func):
            return result
        call = self._calls[self._number] if self._number < len(self._calls) else None
        self._number += 1
        if call is None or call.operator is not func or not call.arguments.are_same(_Arguments.of((args, kwargs))):
            return result  # of another call: the rerun takes another way
        if not call.is_unchanged():
            return result
        if not call.is_repeated_by(_tensors(result), run):
            self._different.append(str(func))
        given = [tensor.detach() for tensor in call.results]
        return given[0] if isinstance(result, Tensor) else type(result)(given)


@functools.lru_cache(maxsize=4096)
def _may_differ(func: Any) -> bool:
    """Return whether an operator is outside of aten, and only returns new tensors."""
    operator = operator_of(func)
    if not isinstance(operator, Operator):
        return False
    returns_aliases = any(result.alias_info is not None for result in func._schema.returns)
    return operator.is_foreign and not (operator.written or operator.written_names or returns_aliases)


def _held(func: Any, result: Any, arguments: Any) -> _Call | None:
    """Return what an operator returned, None if it cannot be compared, or is memory of the arguments."""
    results = _tensors(result)
    digests = [digest for tensor in results if (digest := Digest.of(tensor)) is not None]
    if not results or len(digests) < len(results):
        return None
    passed = {id(storage) for storage in storages_of(arguments)}
    if any(id(tensor.untyped_storage()) in passed for tensor in results):
        return None
    return _Call(func, _Arguments.of(arguments), [tensor.detach() for tensor in results], digests)


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors that an operator returned; none if it returned anything else."""
    results = list(result) if type(result) in (tuple, list) else [result]
    return results if all(isinstance(each, Tensor) for each in results) else []
