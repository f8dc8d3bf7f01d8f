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
Rule 4. Where only a part of its bytes was moved so, the tensor moves the rest, and is joined from several
        spans when it comes back: each byte is copied out once.

Rules 1 to 3 are in csrc/offload/span.cpp and session.cpp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actckpt import _C
from actckpt._offload.backends import Backend, Bytes

__all__ = ["Joined", "join"]


class Joined:
    """Bytes of one saved tensor that lie in several spans (Rule 4)."""

    __slots__ = ("_device", "_spans", "nbytes", "start")

    def __init__(self, spans: Sequence["_C.Span"], start: int, nbytes: int, device: torch.device) -> None:
        self._spans = spans
        self.start = start
        self.nbytes = nbytes
        self._device = device

    def fetch(self) -> Bytes:
        """Return the bytes, put together."""
        whole = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        for span in self._spans:
            found = _C.fetch(span)
            if found.storage.nbytes() < found.start + span.nbytes:
                return found  # its memory was freed: the caller compares sizes, and raises
            first, last = max(span.start, self.start), min(span.start + span.nbytes, self.start + self.nbytes)
            part = torch.empty(0, dtype=torch.uint8, device=self._device)
            part.set_(found.storage, found.start + first - span.start, (last - first,), (1,))
            whole[first - self.start : last - self.start].copy_(part)
        return Bytes(whole.untyped_storage(), 0)


def join(
    session: "_C.OffloadSession",
    tensor: Tensor,
    backend: Backend,
    start: int,
    nbytes: int,
    overlapping: Sequence["_C.Span"],
) -> Joined | None:
    """Move what `overlapping` spans do not hold of a tensor's bytes, and join it with them.

    Returns:
        None: the bytes must stay where they are.
    """
    spans: list[_C.Span] = []
    reached, end = start, start + nbytes
    for span in sorted(overlapping, key=lambda span: span.start):
        if span.start > reached:
            moved = session.move(tensor, backend, reached, span.start - reached)
            if moved is None:
                return None
            spans.append(moved)
        if span.start + span.nbytes > reached:
            spans.append(span)
            reached = span.start + span.nbytes
    if reached < end:
        moved = session.move(tensor, backend, reached, end - reached)
        if moved is None:
            return None
        spans.append(moved)
    for span in overlapping:
        _C.share(span)
    return Joined(spans, start, nbytes, tensor.device)
