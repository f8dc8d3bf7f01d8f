"""Finds operators that give other results for the same inputs.

A function runs twice under a mode that takes checksums of what each operator reads and returns. The first operator that
reads the same and returns something else is not repeatable. From then on it returns in the second run what it returned
in the first one, and the function runs twice again, to find the next one. What rounding explains counts as the same.

If an operator reads other values than in the first run, although all operators before it returned the same, something
outside of the dispatcher wrote them. Only memory that an operator of the run allocated counts: other tensors may hold
state of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actckpt._C import Paused, storage_of
from actckpt._core.checksums import are_close, checksum, sums, uncounted
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.sites import module_name
from actckpt._replay.operators import Operator, operator_of
from actckpt._rerun.buffers import written_tensors

__all__ = ["Unrepeatable", "unrepeatable_operators"]

#: Maximum number of operators to find.
_MOST = 8
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class Unrepeatable(NamedTuple):
    """An operator that gives other results for the same inputs; None: code outside of the dispatcher."""

    operator: torch._ops.OpOverload | None
    #: Qualified name of the module that called the operator, or that read what the code wrote; None: there is none.
    module: str | None

    def __str__(self) -> str:
        name = "code outside of the dispatcher" if self.operator is None else operator_of(self.operator).name
        return f"{name} in {self.module}" if self.module else name


def unrepeatable_operators(run: Callable[[], object]) -> list[Unrepeatable]:
    """Return the operators in `run` that are not repeatable; empty if the cause is another one.

    Args:
        run: calls the function; each call starts with the same random state and buffers.
    """
    found: dict[Any, Unrepeatable] = {}
    while len(found) < _MOST and None not in found:
        first = _trace(run, found, {})
        second = _trace(run, found, first.results)
        new = next(_differences(first.calls, second.calls), None)
        if new is None or new.operator in found:
            break
        found[new.operator] = new
    return list(found.values())


class _Digest(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: Tensor
    sums: Tensor | None
    #: Whether an operator of this run allocated the memory.
    is_made: bool

    def differs(self, other: object) -> bool:
        if not isinstance(other, _Digest) or (self.shape, self.dtype) != (other.shape, other.dtype):
            return True
        if torch.equal(self.checksum, other.checksum):
            return False
        return self.sums is None or other.sums is None or not are_close(self.sums, other.sums, self.dtype)


class _Call(NamedTuple):
    operator: torch._ops.OpOverload
    module: str | None
    #: Digests, scalars, and None for anything else.
    read: list[object]
    returned: list[object]


def _trace(run: Callable[[], object], found: dict[Any, Unrepeatable], results: dict[Any, list[Any]]) -> _Trace:
    mode = _Trace(found, results)
    with mode, suppress(Exception):  # after other results, the function itself may fail
        run()
    return mode


def _differences(first: list[_Call], second: list[_Call]) -> Iterator[Unrepeatable]:
    for one, other in zip(first, second, strict=False):
        if one.operator != other.operator or len(one.read) != len(other.read):
            return  # the function ran something else
        for read, again in zip(one.read, other.read, strict=True):
            if isinstance(read, _Digest) and read.differs(again):
                if read.is_made:
                    yield Unrepeatable(None, one.module)
                return
            if not isinstance(read, _Digest) and read != again:
                return
        pairs = zip(one.returned, other.returned, strict=False)
        if len(one.returned) != len(other.returned) or any(isinstance(a, _Digest) and a.differs(b) for a, b in pairs):
            yield Unrepeatable(one.operator, one.module)
            return


class _Trace(ObservingMode):
    """Notes what operators read and return.

    Args:
        found: operators whose results are held, or taken from `results`.
        results: by operator, what it returned in an earlier run.
    """

    supports_higher_order_operators = True

    def __init__(self, found: dict[Any, Unrepeatable], results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._earlier = found, results
        self.results: dict[Any, list[Any]] = {}
        self.calls: list[_Call] = []
        #: Storages that operators allocated.
        self._made: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        operator, written = operator_of(func), written_tensors(func, args, kwargs)
        assert isinstance(operator, Operator)
        overwritten = {id(tensor) for tensor in written} if operator.overwrites else set()
        given = [] if operator.is_view else pytree.tree_leaves((args, kwargs))  # a view reads no elements
        read = [self._digest(each) for each in given if id(each) not in overwritten]
        result = func(*args, **kwargs)
        if func in self._found:
            if self._earlier.get(func):
                result = self._earlier[func].pop(0)
            else:
                self.results.setdefault(func, []).append(result)
        passed = {id(storage) for storage in _storages((args, kwargs))}
        self._made.update({id(storage): storage for storage in _storages(result) if id(storage) not in passed})
        returned = (
            [] if operator.is_uninitialised or operator.is_view else pytree.tree_leaves(result)[: operator.num_compared]
        )
        digests = [self._digest(each) for each in [*returned, *written]]
        self.calls.append(_Call(func, module_name(), read, digests))
        return result

    def _digest(self, value: Any) -> object:
        if isinstance(value, _SCALARS):
            return value
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            return None
        with Paused(), uncounted():
            is_made = id(storage_of(value)) in self._made
            both = checksum(value).cpu(), sums(value).cpu() if value.is_floating_point() else None
            return _Digest(tuple(value.shape), value.dtype, *both, is_made)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    tensors = [storage_of(each) for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
    return [storage for storage in tensors if storage is not None]
