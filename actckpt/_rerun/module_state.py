"""What a rerun finds in modules: what its forward found there.

NOTE [ Found by the forward ]

Rule 1. A parameter, buffer or module that another one has taken the place of is back for the rerun
        (`functional_call`), and each module is in the mode of its forward, training or evaluation. When the rerun ends,
        by an error too, what was there before it is put back. Another thread that runs the same module meanwhile finds
        these, too. Buffers that a forward changes: NOTE [ Buffers ].
Rule 2. What else a function reads and changes (lists, dicts, attributes, globals) is left alone: the audit finds it
        (NOTE [ Audit of reruns ]).
Rule 3. Such reruns run one at a time, as those that restore random state do.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt import _C
from actckpt._C import storage_of
from actckpt._core.tensor_changes import version_of
from actckpt._rerun.buffers import Buffers, Stale, tensors_in, written_tensors
from actckpt.errors import InputChangedError

__all__ = ["modules_as_found", "reads_checked"]


@contextmanager
def modules_as_found(parameters: "_C.Parameters", buffers: Buffers | None) -> Iterator[list[Stale]]:
    """Run the body with the forward's parameters, modules and buffers (Rule 1); yield buffers that it must not read."""
    replaced = parameters.replaced()
    outside = [(entries, key, *_in(entries, key)) for entries, key, *_ in replaced]
    with ExitStack() as stack:
        try:
            _put(replaced)
            yield stack.enter_context(buffers.as_found()) if buffers is not None else []
        finally:
            _put(outside)


#: A dict, a key in it, and what is to stand there; without the last, nothing.
_Entry = tuple[Any, ...]


def _in(entries: dict[str, Any], key: str) -> tuple[Any, ...]:
    return (entries[key],) if key in entries else ()


def _put(replaced: Sequence[_Entry]) -> None:
    for entries, key, *value in replaced:
        if value:
            entries[key] = value[0]
        else:
            entries.pop(key, None)


@contextmanager
def reads_checked(stale: Sequence[Stale], name: str) -> Iterator[None]:
    """Run the body; raise if an operator in it reads one of these tensors (Rule 3 of NOTE [ Buffers ]).

    Raises:
        InputChangedError: one was read, or it cannot be told. Raised when the body ends, too, in case that it caught
            the first one.
    """
    if not stale:
        yield
        return
    for one in stale:
        if storage_of(one.tensor) is None:  # a subclass, say: nothing tells what reads it
            raise _stale_error(one, name)
    mode = _StaleReads(stale, name)
    with mode:
        yield
    if mode.error is not None:
        raise mode.error


#: Operators that read nothing of the tensor that they write.
_OVERWRITE = {torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar}


class _StaleReads(TorchDispatchMode):
    """Raises where an operator reads a tensor that is not as the forward found it."""

    supports_higher_order_operators = True

    def __init__(self, stale: Sequence[Stale], name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._stale = {id(storage): (storage, one) for one in stale for storage in [storage_of(one.tensor)]}
        self.error: InputChangedError | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        written_ids = {id(tensor) for tensor in written}
        read = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in written_ids]
        if (found := self._first_stale(read)) is not None and not _is_view(func):
            # What is computed from a stale tensor in place, for itself, is as stale as it was.
            if not written or any(self._first_stale([tensor]) is None for tensor in written):
                self.error = self.error or _stale_error(found, self._name)
                raise self.error
        elif func in _OVERWRITE:
            self._freshen(written[0])
        return func(*args, **kwargs)

    def _first_stale(self, tensors: Sequence[Tensor]) -> Stale | None:
        storages = (storage_of(tensor) for tensor in tensors)
        return next((self._stale[id(storage)][1] for storage in storages if id(storage) in self._stale), None)

    def _freshen(self, tensor: Tensor) -> None:
        known = self._stale.get(id(storage_of(tensor)))
        if known is not None and tensor.numel() == known[1].tensor.numel():
            del self._stale[id(known[0])]


def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _stale_error(stale: Stale, name: str) -> InputChangedError:
    tensor = stale.tensor
    now = version_of(tensor)
    how = f"was changed in place: it is at version {now}; the forward found version {stale.version}"
    if now == stale.version:
        how = "has other bytes: it was given other memory, or is an inference tensor that was changed"
    return InputChangedError(
        f"{stale.place}, tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, which a rerun of {name} reads, is not "
        f"as its forward found it and {how} (one of the variables needed for gradient computation has been modified "
        f"by an inplace operation).\n{stale.advice}"
    )
