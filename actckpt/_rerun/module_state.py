"""Modules of a region as its forward found them, for reruns.

A replaced parameter, buffer or module (`functional_call`) is put back for the rerun, and so is the training mode.
Another thread that runs the same module meanwhile sees these, too. For buffers that a forward changes see
NOTE [ Buffers ]; one that could not be copied must not be read (`reads_checked`).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._C import storage_of
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.tensor_changes import version_of
from actckpt._rerun.buffers import Buffers, Stale, tensors_in, written_tensors
from actckpt.errors import InputChangedError

__all__ = ["modules_as_found", "reads_checked"]


@contextmanager
def modules_as_found(parameters: "_C.Parameters", buffers: Buffers | None) -> Iterator[list[Stale]]:
    """Run the body with the forward's parameters, modules and buffers; yield buffers that it must not read."""
    replaced = parameters.replaced()
    outside = [(entries, key, *_in(entries, key)) for entries, key, *_ in replaced]
    with ExitStack() as stack:
        try:
            _put(replaced)
            yield stack.enter_context(buffers.as_found()) if buffers is not None else []
        finally:
            _put(outside)


#: A dict, a key in it, and the value to set; without a value, the key is deleted.
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
    """Run the body; raise if an operator in it reads one of these tensors.

    Raises:
        InputChangedError: one was read, or reads cannot be seen. Also raised at the end of the body, in case that user
            code caught the first error.
    """
    if not stale:
        yield
        return
    for one in stale:
        if storage_of(one.tensor) is None:  # a subclass, for example: its reads cannot be seen
            raise _stale_error(one, name)
    mode = _StaleReads(stale, name)
    with mode:
        yield
    if mode.error is not None:
        raise mode.error


#: Operators that do not read the tensor that they write.
_OVERWRITE = {torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar}


class _StaleReads(ObservingMode):
    """Raises if an operator reads a tensor that changed since the forward."""

    supports_higher_order_operators = True

    def __init__(self, stale: Sequence[Stale], name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._stale = {id(storage): (storage, one) for one in stale for storage in [storage_of(one.tensor)]}
        self.error: InputChangedError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        written_ids = {id(tensor) for tensor in written}
        read = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in written_ids]
        if (stale := self._first_stale(read)) is not None and not _is_view(func):
            # A stale tensor that is only updated in place stays as stale as it was.
            if not written or any(self._first_stale([tensor]) is None for tensor in written):
                self.error = self.error or _stale_error(stale, self._name)
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
