"""Offloading of fake tensors: nothing is copied; bytes are released when they would have been written.

This simulates `apply(model, policy="offload")` for device tensors, by the clock of `roofline`.

- Saved tensors of a block, except parameters, buffers and small ones, are written out and read back in backward. Copies
  are serialized on a link; the opposite direction has the same speed.
- Bytes stay until they are written, and within the window: what exceeds it waits for the oldest copy.
- If backward needs bytes that are not written yet, it gets them at once. Otherwise it waits until they are read, and
  tensors saved before are prefetched, up to the window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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

__all__ = ["Link", "SimulatedOffloading"]

_Storage = torch.UntypedStorage
_LEAST_WINDOW, _MOST_WINDOW = 4 << 20, 256 << 20


class _Ticket:
    """The bytes of one storage in the store."""

    __slots__ = ("__weakref__", "back", "loaded", "nbytes", "place", "ready_s", "source", "written_s")

    def __init__(self, source: _Storage, place: int, written_s: float) -> None:
        self.nbytes, self.place, self.written_s = source.nbytes(), place, written_s
        #: Held until it is written.
        self.source: _Storage | None = source
        #: Read, or being read until `ready_s`, and not unpacked yet.
        self.loaded: _Storage | None = None
        self.ready_s = 0.0
        #: What backward got, while something uses it.
        self.back: Callable[[], _Storage | None] = lambda: None


class Link:
    """Both directions between a device and host memory.

    Args:
        clock: has the program's time, and waits.
        bytes_per_s: bandwidth of one direction.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._out_free_s = self._in_free_s = 0.0
        self._writing: deque[_Ticket] = deque()
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._ahead_bytes = self._put_bytes = self._largest = self._stored_bytes = 0
        #: Peak of the bytes in host memory.
        self.host_bytes = 0

    def put(self, source: _Storage) -> _Ticket:
        """Start to write bytes."""
        self._out_free_s = max(self._out_free_s, self._clock.seconds) + source.nbytes() / self._bytes_per_s
        ticket = _Ticket(source, len(self._tickets), self._out_free_s)
        self._tickets.append(weakref.ref(ticket, functools.partial(self._drop, ticket.nbytes)))
        self._stored_bytes += ticket.nbytes
        self.host_bytes = max(self.host_bytes, self._stored_bytes)
        self._writing.append(ticket)
        self._put_bytes += ticket.nbytes
        self._largest = max(self._largest, ticket.nbytes)
        self._settle()
        return ticket

    def _drop(self, nbytes: int, _: object) -> None:
        self._stored_bytes -= nbytes

    def _window(self) -> int:
        """The window, as in csrc/engine/window.h."""
        fixed = config.settings().window_bytes
        if fixed is not None:
            return fixed
        wanted = max(4 * self._largest, math.isqrt(self._put_bytes * self._largest))
        return max(_LEAST_WINDOW, min(wanted, _MOST_WINDOW))

    def _settle(self) -> None:
        """Release what is written; wait for what exceeds the window."""
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
        """Return bytes from the store once they are read."""
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
class SimulatedOffloading:
    """How the blocks of a model are offloaded.

    Attributes:
        link: for all copies.
        mode: the fake mode.
        owned: parameters and buffers, which stay.
        min_bytes: smaller tensors stay.
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
            session = _SimulatedSession(self)
            with saved_tensors_hooks(session.pack, session.unpack):
                return original(*args, **kwargs)

        return forward


def _put_back(block: nn.Module, forward: Any) -> None:
    del block.forward
    if forward is not None:
        block.forward = forward


class _SimulatedSession:
    """The hooks of one call of a block."""

    def __init__(self, offloading: SimulatedOffloading) -> None:
        self._offloading = offloading
        self._owned = {id(tensor.untyped_storage()) for tensor in offloading.owned}
        self._put: dict[int, tuple[weakref.ref[_Storage], weakref.ref[_Ticket]]] = {}

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if id(storage) in self._owned or tensor.nbytes < self._offloading.min_bytes:
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
