"""The only importer of the extension: everything the C++ engine offers, typed.

For CPU tensors: `CpuStore.on_disk(folder, ...)`, or `CpuStore.in_memory(...)` for tests; both fulfil
`actckpt._offload.store.Store`, whose module explains the use of tickets. The classes behind it:

* `Pool`: host memory in slabs, `allocate(nbytes) -> PoolBlock` with `.segments` [(address, bytes)].
* `SpillFile(folder)`: one unlinked file, `write(ptr, nbytes) -> SpillBlock`, `read(block, ptr)`.
* `ByteStore.in_pool(pool)` and `ByteStore.on_disk(file)`: the tiers of a `HostEngine`.
* `HostEngine`: worker threads; `put(ptr, nbytes, tier, keep) -> Ticket`. It may use several tiers.

For device tensors: `DeviceEngine.cuda(limit_bytes=, window_bytes=, release=, ...)`, the event protocol over
pinned host memory and, where that is full, pageable memory (`pageable_limit=`) and disk (`spill_file=`), which
worker threads reach through `bounce_bytes` of pinned buffers (half per direction; 0: pinned memory only).
`why_no_cuda()` is empty where it works, else the reason. Streams are `(device, handle)`, the handle being
`torch.cuda.current_stream(device).cuda_stream`::

    ticket = engine.put(ptr, nbytes, device, stream, alias)    # a DeviceTicket, or why it stays: Kept
    ticket.use(device, other_stream)                           # the same storage is saved on another stream
    found = ticket.get(device, stream)                         # (object, record_stream wanted) or None
    if found is None:                                          # allocate with `stream` current
        ticket.load(device, stream, buffer.data_ptr(), buffer, urgent=True)
        found = ticket.get(device, stream)
    if found[1]:                                               # before the object is used
        found[0].record_stream(torch.cuda.current_stream(device))

Prefetch: allocate with `ticket.put_stream` current, `ticket.load(*ticket.put_stream, ptr, buffer,
urgent=False)`; False means there was no need. At the end of a backward `unload()` what was not read.
`release(keep, uses)` is called for each source that the engine lets go of: call
`keep.record_stream(ExternalStream(handle, device))` for each use and return. It may run at any engine
call and in the garbage collector; it must not raise, nor refer to the engine (a cycle that is never
freed).

MUST and PREFER: `put(..., must=True)` (the default) waits on the host, counted, where bytes that go below
pinned memory find no bounce buffer free. `put(..., must=False)` never waits. It answers `Kept` instead::

    FULL       no tier has room                         CAPTURING  the stream is captured into a graph
    BUSY       no bounce buffer free, window full       FAILED     an earlier device call failed
    BEHIND     copies lag by a window                   STRANDED   a device call of this put failed

`may_use_disk=False` ends at pageable memory. `ticket.tier` is "pinned", "pageable" or "disk". `get` of bytes
below pinned memory waits on the host until workers have brought them (counted; prefetch starts it early).

`ticket.timing` (device and CPU tickets alike) tells how long the program waited for the ticket, and outlives it:
`stall_seconds`, `is_late`, `is_settled` (device waits are known only once they have passed).
`actckpt._offload.demotion` makes the next step's plan of these figures::

    plan = steps.region()                                      # once per region; fixed for the step
    if plan.wants(place):
        ticket = engine.put(..., must=False)
        if not isinstance(ticket, Kept):
            plan.moved(place, ticket.timing)                   # and plan.read() when a backward asks for it

Every error derives from `EngineError`. A call in a forked child raises `ForkedError`. Engines are shut
down at interpreter exit. What may wait releases the GIL.
"""

from __future__ import annotations

from actckpt._C import (
    ByteStore,
    ClosedError,
    DeviceEngine,
    DeviceError,
    DeviceStats,
    DeviceTicket,
    EngineError,
    ForkedError,
    HostEngine,
    HostPoolFullError,
    HostStats,
    Kept,
    Pool,
    PoolBlock,
    PoolStats,
    SourceGoneError,
    SpillBlock,
    SpillFile,
    SpillFullError,
    SpillReadError,
    SpillStats,
    SpillWriteError,
    Ticket,
    Timing,
    fix_mmap_threshold,
    hash64,
    is_memory_folder,
    why_foreign_reads_are_plain,
    why_no_cuda,
)

__all__ = [
    "ByteStore",
    "ClosedError",
    "CpuStore",
    "DeviceEngine",
    "DeviceError",
    "DeviceStats",
    "DeviceTicket",
    "EngineError",
    "ForkedError",
    "HostEngine",
    "HostPoolFullError",
    "HostStats",
    "Kept",
    "Pool",
    "PoolBlock",
    "PoolStats",
    "SourceGoneError",
    "SpillBlock",
    "SpillFile",
    "SpillFullError",
    "SpillReadError",
    "SpillStats",
    "SpillWriteError",
    "Ticket",
    "Timing",
    "fix_mmap_threshold",
    "hash64",
    "is_memory_folder",
    "why_foreign_reads_are_plain",
    "why_no_cuda",
]

_UNLIMITED = (1 << 64) - 1


class CpuStore:
    """A store for CPU tensors: one engine with one tier."""

    def __init__(self, engine: HostEngine, tier: ByteStore) -> None:
        self._engine = engine
        self._tier = tier

    @classmethod
    def on_disk(
        cls,
        folder: str,
        *,
        limit_bytes: int = _UNLIMITED,
        window_bytes: int | None = 256 << 20,
        num_workers: int = 2,
    ) -> CpuStore:
        """Spill to an unlinked file in `folder`.

        Args:
            limit_bytes: most bytes of live tickets in the file; what is above stays in memory.
            window_bytes: most bytes waiting to be written; `put` waits (and helps) above it. None: follows the sizes
                of what is stored, and `stats().window_bytes` tells.
            num_workers: threads that copy; with 0 callers run every copy.
        Raises:
            SpillWriteError: no file can be made in `folder`.
        """
        file = SpillFile(folder, limit_bytes=limit_bytes)
        return cls.on_file(file, window_bytes=window_bytes, num_workers=num_workers)

    @classmethod
    def on_file(cls, file: SpillFile, *, window_bytes: int | None = 256 << 20, num_workers: int = 2) -> CpuStore:
        """Spill to a file that others may share."""
        engine = HostEngine(num_workers=num_workers, window_bytes=window_bytes)
        return cls(engine, ByteStore.on_disk(file))

    @classmethod
    def in_memory(
        cls, *, limit_bytes: int = _UNLIMITED, window_bytes: int | None = 256 << 20, num_workers: int = 2
    ) -> CpuStore:
        """Copy to a host memory pool: saves nothing for CPU tensors, shows everything to tests."""
        pool = Pool(limit_bytes=limit_bytes)
        engine = HostEngine(num_workers=num_workers, window_bytes=window_bytes)
        return cls(engine, ByteStore.in_pool(pool))

    def put(self, ptr: int, nbytes: int, keep: object, *, must: bool = True) -> Ticket | Kept:
        """See `Store.put`; `Kept.BUSY` if it would have to wait and `must` is false."""
        return self._engine.put(ptr, nbytes, self._tier, keep, must=must)

    @property
    def num_failed_writes(self) -> int:
        """Writes that failed so far; cheap enough to ask at every call."""
        return self._engine.num_failed_writes

    def poll(self) -> None:
        """See `Store.poll`."""
        self._engine.poll()

    def flush(self) -> None:
        """See `Store.flush`."""
        self._engine.flush()

    def close(self) -> None:
        """See `Store.close`."""
        self._engine.shutdown()

    def stats(self) -> HostStats:
        """Counters since the store was made."""
        return self._engine.stats()
