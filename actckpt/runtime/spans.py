"""One copy per storage and version: which saved tensors share bytes that are already moved.

NOTE [ Spans ]

Rule 1. A storage is recognised by identity under a weak reference, never by its address alone:
        addresses are used again.
Rule 2. A tensor moves its whole storage where it covers half of it, else the stretch from its first
        to its last byte. So an expanded tensor moves the bytes behind it, and a small view of a
        large storage its own span.
Rule 3. A tensor whose bytes lie within a span that was moved at the same version shares it, if both are
        views of one tensor, or that tensor: only then do they share a version counter. (`x.data` does not:
        its version says nothing of what was done to x.)
"""

import threading
import weakref
from typing import Any

import torch

from actckpt import _frames
from actckpt.runtime.stores import Backend, Bytes

__all__ = ["Span", "span_for"]


class Span:
    """A stretch of one storage at one version, moved to a store."""

    __slots__ = (
        "__weakref__",
        "backend",
        "device",
        "nbytes",
        "num_saved",
        "root",
        "start",
        "storage",
        "ticket",
        "version",
    )

    def __init__(self, backend: Backend, ticket: Any, tensor: torch.Tensor, start: int, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        self.backend = backend
        self.ticket = ticket
        self.storage = weakref.ref(storage)
        self.start = start
        self.nbytes = nbytes
        self.version = tensor._version
        self.root = weakref.ref(root_of(tensor))
        self.device = storage.device
        #: How many saved tensors share it.
        self.num_saved = 1

    def fetch(self) -> Bytes:
        """Return the bytes; blocks on the CPU, never on a device."""
        return self.backend.fetch(self.ticket, self.nbytes, self.device)

    def prefetch(self) -> bool:
        """Begin to bring the bytes back; False if there is no need."""
        return self.backend.prefetch(self.ticket, self.nbytes, self.device)

    def unload(self) -> None:
        """Let go of bytes that were brought back; they stay in the store."""
        self.ticket.unload()


_lock = threading.RLock()  # reentrant: a span may die, and be forgotten, while the lock is held
#: Spans by the address of their storage; see Rule 1 for why that is not enough.
_spans: dict[int, list["weakref.ref[Span]"]] = {}


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `tensor` is a view of, or itself."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def span_for(tensor: torch.Tensor, backend: Backend, *, may_share: bool) -> tuple[Span | None, bool]:
    """Return the span that holds the bytes of `tensor`, and whether it was moved for it just now.

    None: the bytes must stay where they are.
    """
    storage = tensor.untyped_storage()
    start, nbytes = _extent(tensor, storage)
    found = _find(tensor, storage, start, nbytes) if may_share else None
    if found is not None:
        found.num_saved += 1
        found.backend.saved_again(found.ticket, tensor.device)
        return found, False
    source = Bytes(storage, start)
    _frames.mark_source(source)
    ticket = backend.put(source, nbytes)
    if ticket is None:
        return None, False
    span = Span(backend, ticket, tensor, start, nbytes)
    if may_share:
        _remember(storage.data_ptr(), span)
    return span, True


def _extent(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return first byte and byte count of what `tensor` moves (Rule 2)."""
    size = tensor.element_size()
    last: int = sum((int(n) - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, nbytes = int(tensor.storage_offset()) * size, (last + 1) * size
    return (0, storage.nbytes()) if 2 * nbytes >= storage.nbytes() else (start, nbytes)


def _find(tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, nbytes: int) -> Span | None:
    root = root_of(tensor)
    with _lock:
        for reference in tuple(_spans.get(storage.data_ptr(), ())):
            span = reference()
            if (
                span is not None
                and span.storage() is storage
                and span.version == tensor._version
                and span.root() is root
                and span.start <= start
                and start + nbytes <= span.start + span.nbytes
                and (start - span.start) % tensor.element_size() == 0
            ):
                return span
    return None


def _remember(address: int, span: Span) -> None:
    def forget(reference: "weakref.ref[Span]") -> None:
        with _lock:
            entries = _spans.get(address, [])
            if reference in entries:
                entries.remove(reference)
            if not entries:
                _spans.pop(address, None)

    with _lock:
        _spans.setdefault(address, []).append(weakref.ref(span, forget))
