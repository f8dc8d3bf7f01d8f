"""Saved-tensor hooks that move what is worth it to a store, and bring it back in time.

NOTE [ Offload ]

Rule 1. Parameters, buffers and their views stay: somebody else keeps them anyway. A parameter is a
        leaf that requires grad; what modules own is learnt as they run inside.
Rule 2. What stays is held as a detached alias, not as the tensor: an output held as such would keep
        its own graph alive.
Rule 3. Hooks switch autograd's version check off, so every handle has one of its own. For a moved
        tensor a canary does it: an alias that shares the version counter but not the storage.
Rule 4. Every unpack gives a fresh alias. Users (TransformerEngine) clear what they were given.
Rule 5. Reading ahead follows the order of the last backward of a session that saved the same sizes,
        else the reverse order of saving, within a window of bytes.
Rule 6. Bytes that were brought back are let go of after their unpack, since with `retain_graph` the
        handle lives on. Those saved several times, and those read ahead in vain, when backward ends.
Rule 7. Nothing is moved during a rerun: what it saves is needed at once.
"""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actckpt import _frames, config
from actckpt.errors import SavedTensorChangedError
from actckpt.runtime import stores, torch_private
from actckpt.runtime.counters import counters
from actckpt.runtime.spans import Span, span_for

__all__ = ["DEFAULT_MIN_BYTES", "Session", "offloading"]

#: Below it the bookkeeping costs more than the memory is worth.
DEFAULT_MIN_BYTES = 1 << 20
_MAX_LEARNT_ORDERS = 64


class _Stays:
    """A saved tensor that was not moved (Rules 2 and 3)."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = _version(tensor)

    def unpack(self) -> Tensor:
        if _version(self.tensor) != self.version:
            raise _changed_error(self.tensor.shape, self.tensor.dtype, _version(self.tensor), self.version)
        return self.tensor if self.tensor.is_leaf else self.tensor.detach()


class _Moved:
    """A saved tensor whose bytes are in a store: a window on a span."""

    __slots__ = ("canary", "dtype", "is_conj", "offset_bytes", "place", "session", "shape", "span", "stride", "version")

    def __init__(self, tensor: Tensor, span: Span, session: "Session", place: int) -> None:
        self.span = span
        self.session = session
        self.place = place
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset_bytes = tensor.storage_offset() * tensor.element_size()
        self.is_conj = tensor.is_conj()
        self.version = tensor._version
        self.canary = tensor.detach()
        self.canary.data = _empty(tensor)

    def unpack(self) -> Tensor:
        if self.canary._version != self.version:
            raise _changed_error(self.shape, self.dtype, self.canary._version, self.version)
        found = self.session.fetch(self.span, self.place)
        offset = (self.offset_bytes - self.span.start + found.start) // self.dtype.itemsize
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=self.span.device)
            tensor.set_(found.storage, offset, self.shape, self.stride)
            return tensor.conj() if self.is_conj else tensor


class _TakenApart:
    """A tensor subclass whose inner tensors were packed one by one."""

    __slots__ = ("context", "inner", "kind", "shape", "stride")

    def __init__(self, tensor: Any, session: "Session") -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.inner = {name: session.pack(getattr(tensor, name)) for name in names}
        self.kind = type(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def unpack(self) -> Tensor:
        inner = {name: handle.unpack() for name, handle in self.inner.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        return tensor


_Handle = _Stays | _Moved | _TakenApart


class Session:
    """One `offload` block: what it moved, in which order, and what backward has asked for."""

    def __init__(self, to: str, min_bytes: int) -> None:
        self._to = to
        self._min_bytes = min_bytes
        self._owned: dict[int, torch.UntypedStorage] = {}
        self._spans: list[weakref.ref[Span]] = []
        self._sizes: list[int] = []
        self._reading = _ReadingOrder()
        self._lock = threading.Lock()

    @property
    def hooks(self) -> torch_private.Hooks:
        """The pack and unpack hooks."""
        return self.pack, self.unpack

    def pack(self, tensor: Tensor) -> _Handle:
        """Pack hook."""
        kind = type(tensor)
        if kind is not Tensor and hasattr(kind, "__tensor_flatten__") and not _frames.is_rerunning():
            return _TakenApart(tensor, self)
        if kind is not Tensor or not self._is_worth_it(tensor):
            return _Stays(tensor)
        span, is_new = span_for(tensor, stores.backend(self._kind_of(tensor)))
        if span is None:
            counters.add("kept_full", 1)
            return _Stays(tensor)
        if is_new:
            counters.add("offloaded_bytes", span.nbytes)
            self._spans.append(weakref.ref(span))
            self._sizes.append(span.nbytes)
        else:
            counters.add("deduplicated_bytes", tensor.numel() * tensor.element_size())
        return _Moved(tensor, span, self, len(self._spans) - 1)

    @staticmethod
    def unpack(handle: _Handle) -> Tensor:
        """Unpack hook."""
        return handle.unpack()

    def fetch(self, span: Span, place: int) -> stores.Bytes:
        """Return the bytes of a span and begin to bring back those that backward needs next."""
        task = torch_private.current_graph_task_id()
        found = span.fetch()
        counters.add("reloaded_bytes", span.nbytes)
        if task == -1:
            span.unload()
            return found
        with self._lock:
            if self._reading.task != task:
                self._reading = _ReadingOrder(task, self._sizes)
                self._at_end_of(task)
            ahead = self._reading.next_after(place)
            self._reading.note(place, span)
        for following in ahead:
            candidate = self._spans[following]()
            if candidate is not None and not self._reading.read_ahead(candidate):
                break
        if span.num_saved == 1:
            span.unload()
        return found

    def learn_owned(self, module: torch.nn.Module, args: Any) -> None:
        """Module forward pre-hook: what a module owns stays (Rule 1)."""
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if (
                tensor is not None
                and type(tensor) in (Tensor, torch.nn.Parameter)
                and tensor.device.type in ("cpu", "cuda")
            ):
                storage = tensor.untyped_storage()
                self._owned[storage.data_ptr()] = storage  # held, so the address stays taken

    def forget_owned(self) -> None:
        """The block is left: nothing is packed any more."""
        self._owned.clear()

    def _at_end_of(self, task: int) -> None:
        if torch_private.queue_callback is not None:
            torch_private.queue_callback(self._reading.finish)

    def _kind_of(self, tensor: Tensor) -> str:
        return "host" if tensor.is_cuda else "disk"

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if _frames.is_rerunning() or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_neg():
            return False
        if not (tensor.is_cpu or (tensor.is_cuda and self._to != "disk")) or (tensor.is_cpu and self._to == "host"):
            return False
        if tensor.numel() * tensor.element_size() < self._min_bytes or tensor.is_inference() or tensor.numel() == 0:
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if base.is_leaf and base.requires_grad:
            return False
        return tensor.untyped_storage().data_ptr() not in self._owned


class _ReadingOrder:
    """In which order one backward reads the spans of a session, and what is read ahead (Rule 5)."""

    #: Orders of earlier backwards, by the sizes that the session saved.
    _learnt: ClassVar["OrderedDict[tuple[int, ...], list[int]]"] = OrderedDict()

    def __init__(self, task: int = -1, sizes: list[int] | None = None) -> None:
        self.task = task
        self._key = tuple(sizes or ())
        self._order = self._learnt.get(self._key) or list(reversed(range(len(self._key))))
        self._rank = {place: rank for rank, place in enumerate(self._order)}
        self._seen: dict[int, None] = {}
        self._ahead: dict[int, Span] = {}
        self._brought_back: list[weakref.ref[Span]] = []
        self._budget_bytes = config.settings().max_inflight

    def note(self, place: int, span: Span) -> None:
        """The span at `place` is read now."""
        self._seen.setdefault(place)
        if self._ahead.pop(id(span), None) is not None:
            self._budget_bytes += span.nbytes
            counters.add("prefetched", 1)
        if span.num_saved > 1:
            self._brought_back.append(weakref.ref(span))

    def next_after(self, place: int) -> list[int]:
        """Return the places that are read after `place`, nearest first, as far as a window could reach."""
        rank = self._rank.get(place)
        if rank is None or self._budget_bytes <= 0:
            return []
        following, total = [], 0
        for next_rank in range(rank + 1, len(self._order)):
            next_place = self._order[next_rank]
            if total > self._budget_bytes:
                break
            total += self._key[next_place]
            if next_place not in self._seen:
                following.append(next_place)
        return following

    def read_ahead(self, span: Span) -> bool:
        """Begin to bring `span` back if the window has room; returns whether to go on."""
        if id(span) in self._ahead:
            return True
        if span.nbytes > self._budget_bytes:
            return False
        if span.prefetch():
            self._budget_bytes -= span.nbytes
            self._ahead[id(span)] = span
        return True

    def finish(self) -> None:
        """The backward is over: learn its order, let go of what it did not read (Rule 6)."""
        if len(self._seen) == len(self._key):
            self._learnt[self._key] = list(self._seen)
            self._learnt.move_to_end(self._key)
            while len(self._learnt) > _MAX_LEARNT_ORDERS:
                self._learnt.popitem(last=False)
        for span in [*self._ahead.values(), *(reference() for reference in self._brought_back)]:
            if span is not None:
                span.unload()
        self._ahead.clear()


@contextlib.contextmanager
def offloading(session: Session) -> Iterator[None]:
    """Run the body with the hooks of `session`."""
    learning = torch.nn.modules.module.register_module_forward_pre_hook(session.learn_owned)
    try:
        with saved_tensors_hooks(session.pack, session.unpack):
            yield
    finally:
        learning.remove()
        session.forget_owned()


_EMPTY: dict[torch.device, Tensor] = {}


def _empty(like: Tensor) -> Tensor:
    found = _EMPTY.get(like.device)
    if found is None:
        found = _EMPTY[like.device] = torch.empty(0, device=like.device)
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _changed_error(shape: torch.Size, dtype: torch.dtype, version: int, expected: int) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        "One of the variables needed for gradient computation has been modified by an inplace operation: saved "
        f"tensor of shape {tuple(shape)}, {dtype}.\nIt is at version {version}; expected version {expected}.\n"
        "Use the out-of-place operator, or clone the tensor before changing it."
    )
