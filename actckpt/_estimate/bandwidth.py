"""Offloading of fake tensors: nothing moves, bytes are let go when they would have been written out.

NOTE [ Links ]

What `apply(model, policy="offload")` does to tensors of a device, by the clock of NOTE [ Roofline ].

Rule 1. What a block saves, but for parameters, buffers and what is small, is written out and comes back in backward.
        Bytes go one after the other over a link, with one of the same speed for the way back.
Rule 2. What is written stays until it is written, and within the window: what goes beyond waits for the oldest.
Rule 3. Backward that asks for what is not written yet gets it back at once. Otherwise it waits until it was read, and
        what was saved before is read ahead, as far as the window goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actckpt import config
from actckpt._core import torch_private
from actckpt._estimate.roofline import Clock

__all__ = ["Link", "Offloading"]

_Storage = torch.UntypedStorage
_LEAST_WINDOW, _MOST_WINDOW = 4 << 20, 256 << 20


class _Ticket:
    """The bytes of one storage that were put."""

    __slots__ = ("__weakref__", "back", "loaded", "nbytes", "place", "ready_s", "source", "written_s")

    def __init__(self, source: _Storage, place: int, written_s: float) -> None:
        self.nbytes, self.place, self.written_s = source.nbytes(), place, written_s
        #: Held until it is written.
        self.source: _Storage | None = source
        #: Read, or being read until `ready_s`, and not asked for yet.
        self.loaded: _Storage | None = None
        self.ready_s = 0.0
        #: What was given to backward, as long as something uses it.
        self.back: Callable[[], _Storage | None] = lambda: None


class Link:
    """Both ways between a device and the memory of the host.

    Args:
        clock: says where the program is, and waits.
        bytes_per_s: one way.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._out_free_s = self._in_free_s = 0.0
        self._writing: deque[_Ticket] = deque()
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._ahead_bytes = self._put_bytes = self._largest = 0

    def put(self, source: _Storage) -> _Ticket:
        """Begin to write bytes out."""
        self._out_free_s = max(self._out_free_s, self._clock.seconds) + source.nbytes() / self._bytes_per_s
        ticket = _Ticket(source, len(self._tickets), self._out_free_s)
        self._tickets.append(weakref.ref(ticket))
        self._writing.append(ticket)
        self._put_bytes += ticket.nbytes
        self._largest = max(self._largest, ticket.nbytes)
        self._settle()
        return ticket

    def _window(self) -> int:
        """As csrc/engine/window.h says."""
        fixed = config.settings().window_bytes
        if fixed is not None:
            return fixed
        wanted = max(4 * self._largest, math.isqrt(self._put_bytes * self._largest))
        return max(_LEAST_WINDOW, min(wanted, _MOST_WINDOW))

    def _settle(self) -> None:
        """Let go of what is written; wait for what does not fit into the window."""
        in_flight = sum(ticket.nbytes for ticket in self._writing if ticket.source is not None)
        while self._writing:
            oldest = self._writing[0]
            if oldest.source is not None and oldest.written_s > self._clock.seconds:
                if in_flight <= self._window():
                    return
                self._clock.wait_until(oldest.written_s)
            in_flight -= oldest.nbytes if oldest.source is not None else 0
            oldest.source = None
            self._writing.popleft()

    def get(self, ticket: _Ticket) -> _Storage:
        """Return bytes that were put, once they are there."""
        self._settle()
        storage = ticket.back() or ticket.source
        if storage is None:
            if ticket.loaded is None:
                self._load(ticket)
            self._clock.wait_until(ticket.ready_s)
            storage, ticket.loaded = ticket.loaded, None
            assert storage is not None
            self._ahead_bytes -= ticket.nbytes
        ticket.source = None
        ticket.back = weakref.ref(storage)
        self._read_ahead(ticket.place)
        return storage

    def _load(self, ticket: _Ticket) -> None:
        self._in_free_s = max(self._in_free_s, self._clock.seconds) + ticket.nbytes / self._bytes_per_s
        ticket.ready_s = self._in_free_s
        ticket.loaded = torch.empty(ticket.nbytes, dtype=torch.uint8).untyped_storage()
        self._ahead_bytes += ticket.nbytes

    def _read_ahead(self, place: int) -> None:
        for reference in reversed(self._tickets[:place]):
            ticket = reference()
            if ticket is None or ticket.loaded is not None or ticket.source is not None or ticket.back() is not None:
                continue
            if self._ahead_bytes + ticket.nbytes > self._window():
                return
            self._load(ticket)


@dataclasses.dataclass(frozen=True)
class Offloading:
    """How the blocks of a model are offloaded.

    Attributes:
        link: which everything takes.
        mode: under which the fakes are made.
        owned: parameters and buffers, which stay.
        min_bytes: what is smaller stays.
    """

    link: Link
    mode: Any
    owned: Iterable[Tensor]
    min_bytes: int

    @contextlib.contextmanager
    def of(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Offload what these blocks save."""
        with contextlib.ExitStack() as exits:
            for block in blocks:
                exits.callback(_put_back, block, block.__dict__.get("forward"))
                block.forward = self._opened(block.forward)
            yield

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            session = _Session(self)
            with saved_tensors_hooks(session.pack, session.unpack):
                return original(*args, **kwargs)

        return forward


def _put_back(block: nn.Module, forward: Any) -> None:
    del block.forward
    if forward is not None:
        block.forward = forward


class _Session:
    """The hooks of one call of a block."""

    def __init__(self, offloading: Offloading) -> None:
        self._offloading = offloading
        self._owned = {id(tensor.untyped_storage()) for tensor in offloading.owned}
        self._put: dict[int, tuple[weakref.ref[_Storage], weakref.ref[_Ticket]]] = {}

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if id(storage) in self._owned or storage.nbytes() < self._offloading.min_bytes:
            return tensor if tensor.is_leaf else tensor.detach()
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        known = self._put.get(id(storage))
        ticket = known[1]() if known is not None and known[0]() is storage else None
        if ticket is None:
            ticket = self._offloading.link.put(storage)
            self._put[id(storage)] = weakref.ref(storage), weakref.ref(ticket)
        return ticket, layout

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        ticket, layout = packed
        return torch_private.new_fake(self._offloading.mode, self._offloading.link.get(ticket), *layout)
