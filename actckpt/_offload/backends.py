"""Where offloaded bytes go: the engine, as the hooks use it.

`CpuBackend` spills CPU tensors to disk (or, for tests, to a host pool). `CudaBackend` copies device tensors to
pinned host memory on side streams; where that is full, on to pageable memory, and to disk if
`configure(spill_dir=...)` named a folder; where nothing has room, the tensor stays. Both are made at first use with
the settings in force.

`put(source, nbytes, must=...)` answers a ticket, or None if the bytes stay. With `must` (`MUST_CPU_OFFLOAD`, and
every `offload` block) it may wait where copies are behind: CPU tensors for the window, device tensors only for a
bounce buffer below pinned memory; counted in `stats`. Without (`PREFER_CPU_OFFLOAD`) it never waits: the bytes stay.
`ticket.timing` (`actckpt._offload.demotion.Timing`) tells afterwards how long the program waited for that ticket.

What goes wrong in a store, but loses nothing, is logged once per process and reason.
"""

import logging
import threading
from contextlib import suppress
from typing import Any, Protocol

import torch

from actckpt import _C, config
from actckpt._core import pressure, torch_private
from actckpt._offload import figures, limits, native

_log = logging.getLogger(__name__)

_UNLIMITED = (1 << 64) - 1
#: glibc keeps freed blocks below its mmap threshold, which it raises by itself up to 32 MiB.
_MMAP_THRESHOLD_BYTES = 1 << 20


#: A stretch of a storage that the engine reads from or writes to; keeps the storage alive.
Bytes = _C.Bytes


class Backend(Protocol):
    """One way to move bytes out and back."""

    @property
    def window_bytes(self) -> int:
        """How many bytes may be on their way at once, as things stand."""

    def put(self, source: Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        """Begin to move bytes out; returns a ticket, or None if they stay. Waits for room only if `must`."""

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        """Note that the same bytes were saved again, perhaps on another stream."""

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes:
        """Return the bytes, valid for the current stream."""

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes | None:
        """Begin to bring the bytes back; returns to where, None if there is no need."""


class CpuBackend:
    """Moves CPU tensors to a spill file."""

    def __init__(self, store: native.CpuStore) -> None:
        self.store = store
        self._num_failed = 0
        figures.note(self, store)

    @classmethod
    def on_disk(cls, settings: config.Settings) -> "CpuBackend":
        if settings.fix_malloc:
            native.fix_mmap_threshold(_MMAP_THRESHOLD_BYTES)
        file = _spill_file(settings)
        store = native.CpuStore.on_file(file, window_bytes=settings.window_bytes, num_workers=settings.num_workers)
        _tell_of_threads(store.stats(), settings.num_workers)
        return cls(store)

    @property
    def window_bytes(self) -> int:
        return self.store.stats().window_bytes

    def put(self, source: Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        if torch_private.is_tracing():
            return None
        self._check_writes()
        ticket = self.store.put(source.storage.data_ptr() + source.start, nbytes, source, must=must)
        return None if isinstance(ticket, native.Kept) else ticket

    def _check_writes(self) -> None:
        """Tell of writes that failed meanwhile; their tensors stayed."""
        if self.store.num_failed_writes == self._num_failed:
            return
        found = self.store.stats()
        self._num_failed = found.num_failed_writes
        num_failed = found.num_failed_writes - found.num_gone_sources  # those are no fault of the disk
        _warn_of_writes(num_failed, found.num_full_writes, found.last_error)

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        pass

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes:
        self._check_writes()
        found = ticket.get()
        while found is None:  # again where another thread lets go in between
            buffer = _buffer(nbytes, device)
            found = ticket.load(buffer.storage.data_ptr(), buffer)
        assert isinstance(found, Bytes)
        return found

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes | None:
        buffer = _buffer(nbytes, device)
        return buffer if ticket.prefetch(buffer.storage.data_ptr(), buffer) else None


class CudaBackend:
    """Moves CUDA tensors to host memory and disk, on side streams (csrc/engine/protocol/README.md)."""

    def __init__(self, engine: native.DeviceEngine) -> None:
        self.engine = engine
        self._num_failed = 0
        figures.note(self, engine)

    @classmethod
    def from_settings(cls, settings: config.Settings) -> "CudaBackend":
        host = settings.host_limit if settings.host_limit is not None else limits.default_host_limit()
        pageable = settings.pageable_limit
        if pageable is None:
            pageable = limits.default_pageable_limit(host)
        file = None if settings.spill_dir is None else _spill_file(settings)
        bounce, buffer = limits.bounce_sizes(host if pageable or file else 0)
        engine = native.DeviceEngine.cuda(
            limit_bytes=host - bounce,
            window_bytes=settings.window_bytes,
            release=_record_streams,
            pageable_limit=pageable,
            spill_file=file,
            bounce_bytes=bounce,
            buffer_bytes=buffer,
            num_workers=max(1, settings.num_workers),
        )
        return cls(engine)

    @property
    def window_bytes(self) -> int:
        return self.engine.stats().window_bytes

    def put(self, source: Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        if torch_private.is_tracing():
            return None
        device = source.storage.device.index
        stream = torch.cuda.current_stream(device).cuda_stream
        ticket = self.engine.put(source.storage.data_ptr() + source.start, nbytes, device, stream, source, must=must)
        if isinstance(ticket, native.Kept):
            self._tell_kept(ticket, nbytes)
            return None
        if ticket.tier != "pinned":
            self._tell_below(ticket.tier)
        return ticket

    def _tell_kept(self, why: native.Kept, nbytes: int) -> None:
        if why == native.Kept.FULL:
            pool = self.engine.pool_stats()
            _warn_once(
                "full",
                "No store has room for %.1f MiB of a GPU tensor: it stays on the GPU. Pinned memory holds %.1f of at "
                "most %.1f MiB. Raise configure(host_limit=...) or pageable_limit, or set spill_dir. Told once; "
                "actckpt.stats().kept_full counts.",
                nbytes / 2**20,
                pool.stored_bytes / 2**20,
                pool.limit_bytes / 2**20,
            )
        elif why in (native.Kept.FAILED, native.Kept.STRANDED):
            _warn_once(
                "device",
                "A device call of the offload engine failed: nothing is moved any more, tensors stay on the GPU. %s",
                self.engine.stats().last_error,
            )

    def _tell_below(self, tier: str) -> None:
        _warn_once(
            tier,
            "Pinned host memory is full: GPU tensors go on to %s, which is slower. Raise configure(host_limit=...) to "
            "avoid it. Told once; actckpt.stats() counts.",
            "the spill file" if tier == "disk" else "pageable memory",
        )
        if tier == "disk":
            found = self.engine.stats()
            if found.num_failed_writes != self._num_failed:
                self._num_failed = found.num_failed_writes
                _warn_of_writes(found.num_failed_writes, found.num_full_writes, found.spill_error)

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        ticket.use(device.index, torch.cuda.current_stream(device).cuda_stream)

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes:
        stream = torch.cuda.current_stream(device)
        found = ticket.get(device.index, stream.cuda_stream)
        while found is None:  # another thread may unload between load and get
            buffer = _buffer(nbytes, device)
            ticket.load(device.index, stream.cuda_stream, buffer.storage.data_ptr(), buffer, urgent=True)
            found = ticket.get(device.index, stream.cuda_stream)
        result, record = found
        assert isinstance(result, Bytes)
        if record:
            _tensor_on(result.storage).record_stream(stream)
        return result

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes | None:
        put_device, put_stream = ticket.put_stream
        with torch.cuda.stream(torch.cuda.ExternalStream(put_stream, device=put_device)):
            buffer = _buffer(nbytes, device)
        began = ticket.load(put_device, put_stream, buffer.storage.data_ptr(), buffer, urgent=False)
        return buffer if began else None


_warned: set[str] = set()


def _warn_once(reason: str, message: str, *args: object) -> None:
    """Log once per process and reason: a training step must not fill the log."""
    with _lock:
        if reason in _warned:
            return
        _warned.add(reason)
    _log.warning(message, *args)


def _tell_of_threads(found: native.HostStats, num_asked: int) -> None:
    """Tell that copies have fewer threads than they should."""
    if found.num_workers < num_asked:
        _warn_once(
            "threads",
            "Only %d of %d threads to copy to the spill file could be made: %s. %s Raise the limit of threads (ulimit "
            "-u, pids.max of the cgroup) or of memory (ulimit -v), or ask for fewer with configure(num_workers=...).",
            found.num_workers,
            num_asked,
            found.last_error,
            "They copy all." if found.num_workers else "Callers copy, once max_inflight bytes wait.",
        )


def _warn_of_writes(num_failed: int, num_full: int, error: str) -> None:
    """Tell of failed writes, each kind once: a disk that is full, and one that is broken."""
    kept = "what could not be written stays in memory; nothing is lost. Told once; actckpt.stats() counts."
    if num_full:
        _warn_once("disk full", "The spill file is full: %s %s", kept, error)
    if num_failed > num_full:
        _warn_once("disk broken", "Writing to the spill file fails: %s %s", kept, error)


_lock = threading.RLock()
_files: dict[int, native.SpillFile] = {}


def _spill_file(settings: config.Settings) -> native.SpillFile:
    """Return the one spill file of these settings, shared by both backends: its limit is one."""
    with _lock:
        known = _files.get(config.generation)
        if known is None:
            folder = settings.spill_folder
            if native.is_memory_folder(folder):
                _warn_once(
                    f"in memory: {folder}",
                    "The spill folder %s is in memory (tmpfs): offloading to it frees nothing. Set another one with "
                    "actckpt.configure(spill_dir=...).",
                    folder,
                )
            limit = _UNLIMITED if settings.disk_limit is None else settings.disk_limit
            known = native.SpillFile(folder, limit_bytes=limit)
            _files.clear()
            _files[config.generation] = known
        return known


def _buffer(nbytes: int, device: torch.device) -> Bytes:
    return Bytes(torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage(), 0)


def _tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _record_streams(source: object, uses: list[tuple[int, int]]) -> None:
    assert isinstance(source, Bytes)
    tensor = _tensor_on(source.storage)
    for device, stream in uses:
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=device))


_backends: dict[str, tuple[int, Backend]] = {}


def backend(kind: str) -> Backend:
    """Return the backend `"disk"` or `"host"`, made at first use with the settings in force.

    Raises:
        EngineError: it cannot be had here; says why.
    """
    with _lock:
        generation, known = _backends.get(kind, (-1, None))
        if known is None or generation != config.generation:
            settings = config.settings()
            known = CpuBackend.on_disk(settings) if kind == "disk" else CudaBackend.from_settings(settings)
            _backends[kind] = config.generation, known
        return known


def window_bytes() -> int:
    """Return how many bytes the stores that exist would have on their way at once."""
    return max((made.window_bytes for _, made in list(_backends.values())), default=0)


def existing(kind: str) -> Backend | None:
    """Return the backend if it was made already."""
    return _backends.get(kind, (0, None))[1]


def is_ready(kind: str) -> bool:
    """Whether the backend was made already with the settings in force."""
    return _backends.get(kind, (-1, None))[0] == config.generation


def _release_free_slabs(nbytes: int) -> int:
    """Give free host memory back to the system, however much is asked for; returns how many bytes it was."""
    made = existing("host")
    with suppress(native.ForkedError):
        return made.engine.trim() if isinstance(made, CudaBackend) else 0
    return 0


pressure.register("host pool", _release_free_slabs)
