"""Saved-tensor hooks that move what is worth it to a store, and bring it back in time.

NOTE [ Offload ]

Rule 1. Parameters, buffers and their views stay: somebody else keeps them anyway. A parameter is a leaf
        that requires grad, or of type Parameter. Buffers are looked up in the modules whose forward runs.
Rule 2. What stays is held as a detached alias, unless it is a leaf: an output held as such would keep its own
        graph alive.
Rule 3. Hooks switch autograd's version check off, so every handle has one of its own. For a moved tensor a
        canary does it: an alias that shares the version counter but not the storage. Of a subclass, whose
        inner tensors do not count what is done to it, the tensor itself is asked as long as it lives.
Rule 4. Every unpack gives a fresh alias: users (TransformerEngine) clear what they were given. It shares the
        canary's version counter, so a backward that changes what it saved is noticed by the next unpack.
Rule 5. Bytes that were brought back are let go of after their unpack, since with `retain_graph` the handle
        lives on; those saved several times, when backward ends. See also NOTE [ Reading ahead ].
Rule 6. Nothing is moved during a rerun: what it saves is needed at once.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actckpt import _frames
from actckpt.errors import SavedTensorChangedError
from actckpt.runtime import stays, stores, torch_private
from actckpt.runtime.counters import counters
from actckpt.runtime.reading import learnt_order, note_order, window
from actckpt.runtime.spans import Span, root_of, span_for
from actckpt.runtime.stack import modules_on_stack

__all__ = ["DEFAULT_MIN_BYTES", "Session", "offloading"]

#: Below it the bookkeeping costs more than the memory is worth.
DEFAULT_MIN_BYTES = 1 << 20


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
            alias = self.canary.detach()
            alias.data = tensor.conj() if self.is_conj else tensor
            return alias


class _TakenApart:
    """A tensor subclass whose inner tensors were packed one by one."""

    __slots__ = ("context", "inner", "kind", "shape", "stride", "tensor", "version")

    def __init__(self, tensor: Any, session: "Session") -> None:
        names, self.context = tensor.__tensor_flatten__()
        # Shared with nobody: their versions do not tell what was done to the outer tensor.
        self.inner = {name: session.pack(getattr(tensor, name), may_share=False) for name in names}
        self.tensor = weakref.ref(tensor)
        self.version = _version(tensor)
        self.kind = type(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def unpack(self) -> Tensor:
        outer = self.tensor()
        if outer is not None and _version(outer) != self.version:
            raise _changed_error(self.shape, outer.dtype, _version(outer), self.version)
        inner = {name: handle.unpack() for name, handle in self.inner.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        return tensor


_Handle = _Stays | _Moved | _TakenApart


class Session:
    """One `offload` block: what it moved, in which order, and what backward has asked for."""

    _last = threading.local()

    def __init__(self, to: str, min_bytes: int) -> None:
        self._to = to
        self._min_bytes = min_bytes
        self._spans: list[weakref.ref[Span]] = []
        self._sizes: list[int] = []
        self._places: weakref.WeakKeyDictionary[Span, int] = weakref.WeakKeyDictionary()
        self._num_alive = 0
        self._task = -1
        self._order: list[int] = []
        self._rank: dict[int, int] = {}
        self._seen: dict[int, None] = {}
        #: The session before this one, which backward reaches after it.
        previous: weakref.ref[Session] | None = getattr(self._last, "session", None)
        self._previous = previous
        self._last.session = weakref.ref(self)

    @property
    def hooks(self) -> torch_private.Hooks:
        """The pack and unpack hooks."""
        return self.pack, self.unpack

    def pack(self, tensor: Tensor, *, may_share: bool = True) -> _Handle:
        """Pack hook."""
        kind = type(tensor)
        if _frames.is_rerunning() or not self._may_move(tensor):
            return _Stays(tensor)
        if kind is not Tensor:
            return _TakenApart(tensor, self)
        if not self._is_worth_it(tensor):
            return _Stays(tensor)
        span, is_new = span_for(tensor, stores.backend("host" if tensor.is_cuda else "disk"), may_share=may_share)
        if span is None:
            counters.add("kept_full", 1)
            return _Stays(tensor)
        if is_new:
            counters.add("offloaded_bytes", span.nbytes)
            self._spans.append(weakref.ref(span, self._forget))
            self._sizes.append(span.nbytes)
            self._num_alive += 1
            self._places[span] = len(self._spans) - 1
        else:
            counters.add("deduplicated_bytes", tensor.numel() * tensor.element_size())
        return _Moved(tensor, span, self, self._places.get(span, -1))  # -1: moved by another session

    @staticmethod
    def unpack(handle: _Handle) -> Tensor:
        """Unpack hook."""
        return handle.unpack()

    def fetch(self, span: Span, place: int) -> stores.Bytes:
        """Return the bytes of a span and begin to bring back those that backward needs next."""
        task = torch_private.current_graph_task_id()
        found = span.fetch()
        counters.add("reloaded_bytes", span.nbytes)
        window.asked_for(span)
        if task != -1:
            self._begin(task)
            self._seen.setdefault(place)
            self._read_ahead(task, self._rank.get(place, len(self._order)) + 1)
        if span.num_saved == 1 or task == -1:
            span.unload()
        return found

    def _begin(self, task: int) -> None:
        """Prepare for a backward that has not read anything here yet."""
        if self._task == task:
            return
        self._task = task
        self._order = learnt_order(self._sizes)
        self._rank = {place: rank for rank, place in enumerate(self._order)}
        self._seen = {}
        if torch_private.queue_callback is not None:
            torch_private.queue_callback(self._end)

    def _end(self) -> None:
        """The backward is over."""
        note_order(self._sizes, self._seen)
        for reference in tuple(self._spans):
            span = reference()
            if span is not None and span.num_saved > 1:
                span.unload()

    def _read_ahead(self, task: int, rank: int) -> None:
        """Begin to bring back what comes at `rank` and after, then what earlier sessions moved."""
        # Other threads may begin the lists anew (_forget): what is read ahead is a hint, never the bytes.
        spans = self._spans
        for place in self._order[rank : rank + _MAX_AHEAD]:
            span = spans[place]() if place < len(spans) and place not in self._seen else None
            if span is not None and not window.read_ahead(span, task):
                return
        if rank + _MAX_AHEAD < len(self._order):
            return
        previous = self._previous() if self._previous is not None else None
        if previous is not None and previous._task != task:
            previous._read_ahead_as_next(task)

    def _read_ahead_as_next(self, task: int) -> None:
        spans = self._spans
        for place in learnt_order(self._sizes)[:_MAX_AHEAD]:
            span = spans[place]() if place < len(spans) else None
            if span is not None and not window.read_ahead(span, task):
                return
        previous = self._previous() if self._previous is not None else None
        if previous is not None and len(self._sizes) < _MAX_AHEAD and previous._task != task:
            previous._read_ahead_as_next(task)

    def _forget(self, reference: "weakref.ref[Span]") -> None:
        """A span is gone. Once all are, the lists begin anew: a block may go around a whole training."""
        self._num_alive -= 1
        if self._num_alive == 0:
            self._spans, self._sizes, self._task = [], [], -1

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether tensors of this kind can be moved at all."""
        if type(tensor) is not Tensor and not hasattr(type(tensor), "__tensor_flatten__"):
            return False
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
            return False
        if stays.must_stay(tensor):
            return False
        root = root_of(tensor)
        return not (root.is_leaf and root.requires_grad) and not isinstance(root, torch.nn.Parameter)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if tensor.is_neg() or tensor.numel() == 0 or not _has_storage(tensor):
            return False
        if not (tensor.is_cpu or (tensor.is_cuda and self._to != "disk")) or (tensor.is_cpu and self._to == "host"):
            return False
        if tensor.numel() * tensor.element_size() < self._min_bytes:
            return False
        return not (root_of(tensor).is_leaf and _is_owned(tensor))


#: Spans looked at per unpack; keeps the time of an unpack bounded.
_MAX_AHEAD = 64


def _has_storage(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor can be reached; those of torch.func's wrappers cannot."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False


def _is_owned(tensor: Tensor) -> bool:
    """Whether a leaf is a buffer or parameter of a module whose forward runs, or a view of one (Rule 1)."""
    address = tensor.untyped_storage().data_ptr()
    for module in modules_on_stack():
        for owned in (*module._parameters.values(), *module._buffers.values()):
            if owned is None or owned.layout is not torch.strided or not _has_storage(owned):
                continue
            if owned.untyped_storage().data_ptr() == address:
                return True
    return False


def offloading(session: Session) -> saved_tensors_hooks:
    """Return a context with the hooks of `session`."""
    return saved_tensors_hooks(session.pack, session.unpack)


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
