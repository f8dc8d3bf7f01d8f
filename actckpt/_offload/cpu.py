"""The store of CPU tensors: a spill file, behind bounce buffers that worker threads write and read."""

from actckpt import _C, config
from actckpt._offload import limits, notices
from actckpt._offload.engine_store import EngineStore
from actckpt._offload.spill import spill_file

__all__ = ["CpuStore"]

_UNLIMITED = (1 << 64) - 1
#: glibc caches freed blocks below its mmap threshold, which it raises on its own up to 32 MiB.
_MMAP_THRESHOLD_BYTES = 1 << 20
#: At least this much of a tensor is copied at a time, however small the window.
_LEAST_INFLIGHT_BYTES = 64 << 10


class CpuStore(EngineStore):
    """A store for CPU tensors: an engine and its spill file."""

    @classmethod
    def from_settings(cls, settings: config.Settings) -> "CpuStore":
        if settings.fix_malloc:
            _C.fix_mmap_threshold(_MMAP_THRESHOLD_BYTES)
        file = spill_file(settings)
        store = cls.on_file(file, window_bytes=settings.window_bytes, num_workers=settings.num_workers)
        notices.tell_of_threads(*store.engine.start_workers(), settings.num_workers)
        return store

    @classmethod
    def on_disk(
        cls, folder: str, *, limit_bytes: int = _UNLIMITED, window_bytes: int | None = None, num_workers: int = 2
    ) -> "CpuStore":
        """Spill to an unlinked file in `folder`.

        Args:
            limit_bytes: maximum bytes of live tickets in the file; the rest stays in memory.
            window_bytes: see `on_file`.
            num_workers: see `on_file`.
        Raises:
            OffloadError: no file can be created in `folder`.
        """
        file = _C.SpillFile(folder, limit_bytes=limit_bytes)
        return cls.on_file(file, window_bytes=window_bytes, num_workers=num_workers)

    @classmethod
    def on_file(cls, file: _C.SpillFile, *, window_bytes: int | None = None, num_workers: int = 2) -> "CpuStore":
        """Spill to a file that other stores may share.

        Args:
            window_bytes: maximum bytes in bounce buffers, each way; `put` waits (and helps) while all are in use. None:
                32 MiB, and prefetched bytes follow the sizes of the stored tensors.
            num_workers: threads that copy; with 0 callers run every copy.
        """
        most = _UNLIMITED if window_bytes is None else 8 * max(window_bytes, _LEAST_INFLIGHT_BYTES)
        bounce, buffer = limits.bounce_sizes(most)
        engine = _C.DeviceEngine.host(
            spill_file=file,
            window_bytes=window_bytes,
            bounce_bytes=bounce,
            buffer_bytes=buffer,
            num_workers=num_workers,
        )
        return cls(engine, None)

    def flush(self) -> None:
        """Wait until no bounce buffer is being written."""
        self.engine.flush()

    def stats(self) -> _C.DeviceStats:
        """Counters since the store was created."""
        return self.engine.stats()
