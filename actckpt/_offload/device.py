"""The store of device tensors: pinned host memory, and disk below it.

Copies go to pinned host memory on side streams. If that is full, they go to disk if `configure(spill_dir=...)` names a
folder. If nothing has room, the tensor stays. csrc/engine/protocol/README.md has the rules of streams and events.
An integrated device uses the host's memory: nothing goes to pinned memory there.
"""

import functools
import threading

import torch

from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._core.torch_private import untraced
from actckpt._offload import counts, limits, notices, sources
from actckpt._offload.spill import spill_file

__all__ = ["DeviceStore", "is_bringing_back", "no_backend", "record_streams"]

_here = threading.local()


def no_backend(device_type: str) -> str:
    """Return why the engine cannot move tensors of such devices, and what to do instead; empty if it can."""
    accelerator = devices.accelerator_of(device_type)
    library = None if accelerator is None else accelerator.driver_library
    why = "it has no backend for them" if library is None else _C.why_no_driver(library)
    return why and (
        f"the engine cannot move tensors of {device_type!r} devices: {why}. Recompute them instead "
        "(policy='recompute', actckpt.checkpoint), or keep them."
    )


class DeviceStore:
    """See `actckpt._offload.stores.Store`."""

    def __init__(self, engine: _C.DeviceEngine, accelerator: Accelerator, host_bytes: int | None = None) -> None:
        self.engine = engine
        self.accelerator = accelerator
        #: Maximum bytes of pinned memory for tensors; None: not limited here.
        self.host_bytes = host_bytes
        self._num_failed = 0
        counts.note(self, engine)
        sources.protect(self)

    @classmethod
    def from_settings(cls, settings: config.Settings, device_type: str) -> "DeviceStore":
        accelerator = devices.accelerator_of(device_type)
        if accelerator is None or accelerator.driver_library is None:
            raise _C.OffloadError(f"offload: {no_backend(device_type)}")
        host = settings.host_limit if settings.host_limit is not None else limits.default_host_limit()
        file = None if settings.spill_dir is None else spill_file(settings)
        bounce, buffer = limits.bounce_sizes(host if file else 0)
        pinned = 0 if accelerator.is_integrated else host - bounce
        engine = _C.DeviceEngine.cuda(
            library=accelerator.driver_library,
            limit_bytes=pinned,
            window_bytes=settings.window_bytes,
            release=functools.partial(record_streams, accelerator),
            spill_file=file,
            bounce_bytes=bounce,
            buffer_bytes=buffer,
            num_workers=max(1, settings.num_workers),
        )
        return cls(engine, accelerator, pinned)

    @property
    def window_bytes(self) -> int:
        """The current maximum of in-flight bytes."""
        return self.engine.stats().window_bytes

    def poll(self) -> None:
        """Release the sources of finished copies. Every other call does so too."""
        self.engine.poll()

    @untraced
    def make_room(self, device: torch.device) -> None:
        """Make the device's current stream wait for copies out beyond the window."""
        assert device.index is not None
        self.engine.make_room(device.index, self.accelerator.stream_handle(device))

    def limit_window(self, nbytes: int | None) -> None:
        """Limit the in-flight bytes from now on; None: the limit of the settings."""
        self.engine.limit_window(nbytes)

    @untraced
    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> _C.DeviceTicket | None:
        device = source.storage.device
        stream = self.accelerator.stream_handle(device)
        address = source.storage.data_ptr() + source.start
        ticket = self.engine.put(address, nbytes, device.index, stream, source, must=must)
        if isinstance(ticket, _C.Kept):
            notices.tell_kept(self.engine, ticket, nbytes, is_integrated=self.accelerator.is_integrated)
            return None
        if ticket.tier == "disk":
            self._tell_of_disk()
        return ticket

    def _tell_of_disk(self) -> None:
        if not self.accelerator.is_integrated:
            notices.tell_of_disk()
        stats = self.engine.stats()
        if stats.num_failed_writes != self._num_failed:
            self._num_failed = stats.num_failed_writes
            notices.tell_of_writes(stats)

    @untraced
    def saved_again(self, ticket: _C.DeviceTicket, device: torch.device, storage: torch.UntypedStorage) -> None:
        assert device.index is not None
        stream = self.accelerator.stream_handle(device)
        if not ticket.use(device.index, stream):  # otherwise the graph would hold it as long as that stream works
            record_streams(self.accelerator, _C.Bytes(storage, 0), [(device.index, stream)])

    @untraced
    def fetch(self, ticket: _C.DeviceTicket, nbytes: int, device: torch.device) -> _C.Bytes:
        stream = self.accelerator.stream_handle(device)
        loaded = ticket.get(device.index, stream)
        while loaded is None:  # another thread may unload between load and get
            buffer = _buffer(nbytes, device)
            ticket.load(device.index, stream, buffer.storage.data_ptr(), buffer, urgent=True)
            loaded = ticket.get(device.index, stream)
        result, record = loaded
        assert isinstance(result, _C.Bytes)
        if record:
            record_streams(self.accelerator, result, [(device.index, stream)])
        return result

    @untraced
    def prefetch(self, ticket: _C.DeviceTicket, nbytes: int, device: torch.device) -> _C.Bytes | None:
        index, handle = ticket.put_stream
        with self.accelerator.on_stream(self.accelerator.stream_at(handle, self.accelerator.device_at(index))):
            buffer = _buffer(nbytes, device)
        began = ticket.load(index, handle, buffer.storage.data_ptr(), buffer, urgent=False)
        return buffer if began else None


def _buffer(nbytes: int, device: torch.device) -> _C.Bytes:
    """Return device memory for bytes that are loaded."""
    _here.is_bringing_back = True
    try:
        return _C.allocate_bytes(nbytes, device)
    finally:
        _here.is_bringing_back = False


def is_bringing_back() -> bool:
    """Return whether this thread currently allocates device memory for loaded bytes."""
    return getattr(_here, "is_bringing_back", False)


@untraced
def record_streams(accelerator: Accelerator, source: object, uses: list[tuple[int, int]]) -> None:
    """Tell the allocator which streams, as (device, handle), use the memory of bytes that the engine returns."""
    assert isinstance(source, _C.Bytes)
    tensor = torch.empty(0, dtype=torch.uint8, device=source.storage.device).set_(source.storage)
    for index, handle in uses:
        accelerator.record_stream(tensor, accelerator.stream_at(handle, accelerator.device_at(index)))
