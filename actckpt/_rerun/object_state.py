"""What a rerun finds in containers, objects and modules: what its forward found there.

NOTE [ Found by the forward ]

Rule 1. A rerun finds in the lists, dicts, sets, deques and attributes of objects that its function and arguments
        lead to (csrc/rerun/object_state.h), and at the global variables that the function names, what the forward
        found there, whoever changed it since: somebody after the forward, or the forward itself, which appended to
        a key-value cache. When the rerun ends, by an error too, what was there before it is put back. So nothing is
        appended twice, and nobody outside sees a rerun.
Rule 2. It is noted which object stands where. The tensors of containers are watched by Rule 1 of NOTE [ Inputs of a
        region ]. Those that only objects lead to may change as long as no rerun reads them: a rerun runs under
        `_StaleReads` once one has changed. Reads of subclasses, and of sparse tensors, are not seen: such a one raises.
Rule 3. What the forward found is held, and never what it left: that may lead to the region's saved tensors, which own
        the region, and Python's collector does not see through autograd's nodes. Nor is the graph held of a tensor
        that the forward displaced: it may have been left there by the call before, whose region that would own.
Rule 4. Left alone are the attributes of modules (frameworks keep state there that a second call must find as the
        first one left it; states of generators come back by NOTE [ Random state ]), objects of torch's classes and of
        the standard library's (but for namespaces and collections), objects with a lock of their own, which other
        threads use, what trackers of random state hold, and what lies beyond 10,000 entries of objects. Globals count
        for functions of one file.
Rule 5. A parameter, buffer or module that another one has taken the place of is back for the rerun
        (`functional_call`). So is what an attribute was before a generator was put there: one that a module makes in
        its first forward has moved on since. Another thread that runs the same module meanwhile finds these, too.
        Buffers that a forward changes: NOTE [ Buffers ].
Rule 6. Such reruns run one at a time, as those that restore random state do.
Rule 7. A rerun that ends early may be between a change and its undoing (`self.depth += 1 ... self.depth -= 1`).
        Containers are put back all the same. Attributes, globals and closure variables may have been set by others
        meanwhile: there the rerun runs to its end, where the function undoes its own change and no other.
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

__all__ = ["modules_as_found", "reads_checked", "structure_as_found"]


@contextmanager
def structure_as_found(structure: "_C.Structure") -> Iterator[None]:
    """Run the body with what the forward found in containers and objects (Rule 1)."""
    if structure.is_empty:
        yield
        return
    replaced = structure.swap_in()
    try:
        yield
    finally:
        structure.put_back(replaced)


@contextmanager
def modules_as_found(parameters: "_C.Parameters", buffers: Buffers | None) -> Iterator[list[Stale]]:
    """Run the body with the forward's parameters, modules and buffers (Rule 5); yield buffers that it must not read."""
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
    """Run the body; raise if an operator in it reads one of these tensors (Rule 2).

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
