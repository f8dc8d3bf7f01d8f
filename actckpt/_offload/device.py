"""The store of device tensors: host memory, and disk below it.

Copies go to pinned host memory on side streams; where that is full, on to pageable memory, and to disk if
`configure(spill_dir=...)` named a folder; where nothing has room, the tensor stays. The rules of streams and events are
in csrc/engine/protocol/README.md.
"""

import torch

from actckpt import _C, config
from actckpt._offload import counts, limits, notices
from actckpt._offload.spill import spill_file

__all__ = ["DeviceStore"]


class DeviceStore:
    """See `actckpt._offload.stores.Store`."""

    def __init__(self, engine: _C.DeviceEngine) -> None:
        self.engine = engine
        self._num_failed = 0
        counts.note(self, engine)

    @classmethod
    def from_settings(cls, settings: config.Settings) -> "DeviceStore":
        host = settings.host_limit if settings.host_limit is not None else limits.default_host_limit()
        pageable = settings.pageable_limit
        if pageable is None:
            pageable = limits.default_pageable_limit(host)
        file = None if settings.spill_dir is None else spill_file(settings)
        bounce, buffer = limits.bounce_sizes(host if pageable or file else 0)
        engine = _C.DeviceEngine.cuda(
            limit_bytes=host - bounce,
            window_bytes=settings.window_bytes,
            release=record_streams,
            pageable_limit=pageable,
            spill_file=file,
            bounce_bytes=bounce,
            buffer_bytes=buffer,
            num_workers=max(1, settings.num_workers),
        )
        return cls(engine)

    @property
    def window_bytes(self) -> int:
        """How many bytes may be on their way at once, as things stand."""
        return self.engine.stats().window_bytes

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> _C.DeviceTicket | None:
        device = source.storage.device.index
        stream = torch.cuda.current_stream(device).cuda_stream
        ticket = self.engine.put(source.storage.data_ptr() + source.start, nbytes, device, stream, source, must=must)
        if isinstance(ticket, _C.Kept):
            notices.tell_kept(self.engine, ticket, nbytes)
            return None
        if ticket.tier != "pinned":
            self._tell_below(ticket.tier)
        return ticket

    def _tell_below(self, tier: str) -> None:
        notices.tell_below_pinned(tier)
        if tier == "disk":
            found = self.engine.stats()
            if found.num_failed_writes != self._num_failed:
                self._num_failed = found.num_failed_writes
                notices.tell_of_failed_writes(found.num_failed_writes, found.num_full_writes, found.spill_error)

    def saved_again(self, ticket: _C.DeviceTicket, device: torch.device) -> None:
        assert device.index is not None
        ticket.use(device.index, torch.cuda.current_stream(device).cuda_stream)

    def fetch(self, ticket: _C.DeviceTicket, nbytes: int, device: torch.device) -> _C.Bytes:
        stream = torch.cuda.current_stream(device)
        found = ticket.get(device.index, stream.cuda_stream)
        while found is None:  # another thread may unload between load and get
            buffer = _C.allocate_bytes(nbytes, device)
            ticket.load(device.index, stream.cuda_stream, buffer.storage.data_ptr(), buffer, urgent=True)
            found = ticket.get(device.index, stream.cuda_stream)
        result, record = found
        assert isinstance(result, _C.Bytes)
        if record:
            _tensor_on(result.storage).record_stream(stream)
        return result

    def prefetch(self, ticket: _C.DeviceTicket, nbytes: int, device: torch.device) -> _C.Bytes | None:
        put_device, put_stream = ticket.put_stream
        with torch.cuda.stream(torch.cuda.ExternalStream(put_stream, device=put_device)):
            buffer = _C.allocate_bytes(nbytes, device)
        began = ticket.load(put_device, put_stream, buffer.storage.data_ptr(), buffer, urgent=False)
        return buffer if began else None


def _tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def record_streams(source: object, uses: list[tuple[int, int]]) -> None:
    """Tell the allocator which streams, of (device, handle), use the memory of a source that the engine releases."""
    assert isinstance(source, _C.Bytes)
    tensor = _tensor_on(source.storage)
    for device, stream in uses:
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=device))
