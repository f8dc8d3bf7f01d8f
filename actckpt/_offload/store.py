"""What a store promises: a place for offloaded bytes, addressed by tickets.

A store knows addresses and byte counts only. Whoever packs a tensor passes the address of its storage,
the byte count, and `keep`: an object that keeps those bytes alive and unchanged (a detached alias of
the tensor). The store holds `keep` until the bytes are safe elsewhere and then drops it.

The life of a ticket::

    ticket = store.put(storage.data_ptr(), storage.nbytes(), alias)   # at pack; once per storage, version
    ...
    out = ticket.get()                         # at unpack: an object whose bytes are valid, or None
    if out is None:                            # not in memory and nobody prefetched it
        buffer = torch.empty(...)
        out = ticket.load(buffer.data_ptr(), buffer)

and, some unpacks ahead, `ticket.prefetch(buffer.data_ptr(), buffer)`. Whatever comes back is one of the
`keep` objects: the source itself while it is still held (no copy was needed), else a destination.

`put(..., must=False)` (for `PREFER_CPU_OFFLOAD`) never waits: it answers a `Kept` where the in-flight window has no
room, and the bytes stay where they are. `ticket.timing` outlives the ticket and tells how long the program waited for
it; `actckpt._offload.demotion` plans the next step by that.

Rules for callers:

* `keep` must not refer to the ticket, or neither is ever freed.
* A source that is modified after `put` may be stored in either state: check versions at unpack.
* The order of saving and of unpacking is free; every method may be called from any thread.
* Dropping the last reference to a ticket is `drop()`. It never waits and may happen in the garbage
  collector; a copy that is still running keeps its memory until it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from actckpt._offload.demotion import Timing

if TYPE_CHECKING:
    from actckpt._offload.native import Kept


class Ticket(Protocol):
    """The bytes of one storage, from `Store.put` to `drop`."""

    @property
    def nbytes(self) -> int:
        """The byte count given to `put`."""

    @property
    def timing(self) -> Timing:
        """How long the program waited for this ticket; outlives it."""

    def get(self) -> object | None:
        """Return an object that holds the bytes now, or None if `load` must bring them back.

        Waits for a load that was prefetched and is not finished yet; runs it here if nobody began it.

        Raises:
            SpillReadError: the store gave other bytes than it was given, or none. `get` or `load` may be
                tried again.
            ClosedError: the ticket was dropped or the store closed.
        """

    def prefetch(self, ptr: int, keep: object) -> bool:
        """Begin to read into `ptr`, which `keep` keeps alive. Never waits.

        Returns:
            False, and `keep` is not taken, if there is no need: the source is still held (it now stays
            until `unload` or `drop`), or a load exists already.
        """

    def load(self, ptr: int, keep: object) -> object | None:
        """Read into `ptr` now and return what `get` returns: `keep`, or whatever was there first."""

    def unload(self) -> None:
        """Let go of the destination and of a source that is safe; the bytes stay in the store.

        For graphs that backward runs through again (`retain_graph`). Never waits.
        """

    def drop(self) -> None:
        """End the ticket and give its space back. Idempotent; never waits."""


class Store(Protocol):
    """A place for bytes."""

    def put(self, ptr: int, nbytes: int, keep: object, *, must: bool = True) -> Ticket | Kept:
        """Begin to copy `nbytes` from `ptr` to the store.

        Waits only while more than the in-flight window is being copied; with `must` false it returns a `Kept`
        instead and takes nothing. A copy that fails keeps `keep`, so that no byte is lost: see the store's
        statistics.
        """

    def poll(self) -> None:
        """Drop every `keep` whose copy has ended. `put`, `get` and `drop` do so too."""

    def flush(self) -> None:
        """Wait until no copy to the store is queued or running."""

    def close(self) -> None:
        """Stop the workers. Tickets can still be dropped, nothing else."""
