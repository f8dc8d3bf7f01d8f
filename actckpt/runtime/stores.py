"""Where offloaded bytes go: the engine, as the hooks use it.

`CpuBackend` spills CPU tensors to disk (or, for tests, to a host pool), `CudaBackend` copies device
tensors to pinned host memory on side streams. Both are made at first use with the settings in force.
"""

import logging
import threading
from typing import Any, Protocol

import torch

from actckpt import _frames, config
from actckpt.engine import limits, native

_log = logging.getLogger(__name__)

_UNLIMITED = (1 << 64) - 1
#: glibc keeps freed blocks below its mmap threshold, which it raises by itself up to 32 MiB.
_MMAP_THRESHOLD_BYTES = 1 << 20


#: A stretch of a storage that the engine reads from or writes to; keeps the storage alive.
Bytes = _frames.Bytes


class Backend(Protocol):
    """One way to move bytes out and back."""

    def put(self, source: Bytes, nbytes: int) -> Any | None:
        """Begin to move bytes out; returns a ticket, or None if they must stay."""

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        """Note that the same bytes were saved again, perhaps on another stream."""

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes:
        """Return the bytes, valid for the current stream."""

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> bool:
        """Begin to bring the bytes back; False if there is no need."""


class CpuBackend:
    """Moves CPU tensors to a spill file."""

    def __init__(self, store: native.CpuStore) -> None:
        self.store = store

    @classmethod
    def on_disk(cls, settings: config.Settings) -> "CpuBackend":
        folder = settings.spill_folder
        if native.is_memory_folder(folder):
            _log.warning(
                "The spill folder %s is in memory (tmpfs): offloading to it frees nothing. Set another one with "
                "actckpt.configure(spill_dir=...).",
                folder,
            )
        if settings.fix_malloc:
            native.fix_mmap_threshold(_MMAP_THRESHOLD_BYTES)
        limit = _UNLIMITED if settings.disk_limit is None else settings.disk_limit
        store = native.CpuStore.on_disk(
            folder, limit_bytes=limit, window_bytes=settings.max_inflight, num_workers=settings.num_workers
        )
        return cls(store)

    def put(self, source: Bytes, nbytes: int) -> Any | None:
        return self.store.put(source.storage.data_ptr() + source.start, nbytes, source)

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        pass

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> Bytes:
        found = ticket.get()
        while found is None:  # again where another thread lets go in between
            buffer = _buffer(nbytes, device)
            found = ticket.load(buffer.storage.data_ptr(), buffer)
        assert isinstance(found, Bytes)
        return found

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> bool:
        buffer = _buffer(nbytes, device)
        began: bool = ticket.prefetch(buffer.storage.data_ptr(), buffer)
        return began


class CudaBackend:
    """Moves CUDA tensors to pinned host memory, on side streams (engine_protocol in csrc/engine/protocol)."""

    def __init__(self, engine: native.DeviceEngine) -> None:
        self.engine = engine

    @classmethod
    def from_settings(cls, settings: config.Settings) -> "CudaBackend":
        limit = settings.host_limit if settings.host_limit is not None else limits.default_host_limit()
        engine = native.DeviceEngine.cuda(
            limit_bytes=limit, window_bytes=settings.max_inflight, release=_record_streams
        )
        return cls(engine)

    def put(self, source: Bytes, nbytes: int) -> Any | None:
        device = source.storage.device.index
        stream = torch.cuda.current_stream(device).cuda_stream
        ticket = self.engine.put(source.storage.data_ptr() + source.start, nbytes, device, stream, source)
        return None if isinstance(ticket, native.Kept) else ticket

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

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> bool:
        put_device, put_stream = ticket.put_stream
        with torch.cuda.stream(torch.cuda.ExternalStream(put_stream, device=put_device)):
            buffer = _buffer(nbytes, device)
        began: bool = ticket.load(put_device, put_stream, buffer.storage.data_ptr(), buffer, urgent=False)
        return began


def _buffer(nbytes: int, device: torch.device) -> Bytes:
    return Bytes(torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage(), 0)


def _tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _record_streams(source: object, uses: list[tuple[int, int]]) -> None:
    assert isinstance(source, Bytes)
    tensor = _tensor_on(source.storage)
    for device, stream in uses:
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=device))


_lock = threading.Lock()
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


def existing(kind: str) -> Backend | None:
    """Return the backend if it was made already."""
    return _backends.get(kind, (0, None))[1]
