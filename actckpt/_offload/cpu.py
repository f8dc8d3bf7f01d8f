"""The store of CPU tensors: a spill file that worker threads write and read."""

from typing import Any

import torch

from actckpt import _C, config
from actckpt._offload import counts, notices
from actckpt._offload.spill import spill_file

__all__ = ["CpuStore"]

_UNLIMITED = (1 << 64) - 1
#: glibc caches freed blocks below its mmap threshold, which it raises on its own up to 32 MiB.
_MMAP_THRESHOLD_BYTES = 1 << 20


class CpuStore(_C.CpuStore):
    """A store for CPU tensors: an engine and its spill file. See csrc/bind/cpu_store.h."""

    def __init__(self, engine: _C.CpuEngine) -> None:
        super().__init__(engine)
        counts.note(self, engine)

    @classmethod
    def from_settings(cls, settings: config.Settings) -> "CpuStore":
        if settings.fix_malloc:
            _C.fix_mmap_threshold(_MMAP_THRESHOLD_BYTES)
        file = spill_file(settings)
        store = cls.on_file(file, window_bytes=settings.window_bytes, num_workers=settings.num_workers)
        notices.tell_of_threads(*store.engine.start_workers(), settings.num_workers)
        return store

    @classmethod
    def on_disk(cls, folder: str, *, limit_bytes: int = _UNLIMITED, **engine: Any) -> "CpuStore":
        """Spill to an unlinked file in `folder`.

        Args:
            limit_bytes: maximum bytes of live tickets in the file; the rest stays in memory.
            engine: see `on_file`.
        Raises:
            OffloadError: no file can be created in `folder`.
        """
        return cls.on_file(_C.SpillFile(folder, limit_bytes=limit_bytes), **engine)

    @classmethod
    def on_file(cls, file: _C.SpillFile, *, window_bytes: int | None = 256 << 20, num_workers: int = 2) -> "CpuStore":
        """Spill to a file that other stores may share.

        Args:
            window_bytes: maximum bytes waiting to be written; above it `put` waits (and helps). None: follows the sizes
                of the stored tensors; `stats().window_bytes` has the current value.
            num_workers: threads that copy; with 0 callers run every copy.
        """
        return cls(_C.CpuEngine(file, num_workers=num_workers, window_bytes=window_bytes))

    @property
    def window_bytes(self) -> int:
        """The current maximum of in-flight bytes."""
        return self.stats().window_bytes

    def make_room(self, device: torch.device) -> None:
        """Wait until no more bytes wait to be written than the window allows."""
        self.engine.make_room()

    def limit_window(self, nbytes: int | None) -> None:
        """Limit the bytes waiting to be written from now on; None: the limit of the settings."""
        self.engine.limit_window(nbytes)

    def poll(self) -> None:
        """Release the sources of finished copies. Every other call does so too."""
        self.engine.poll()

    def flush(self) -> None:
        """Wait until no write is queued or running."""
        self.engine.flush()

    def stats(self) -> _C.CpuStats:
        """Counters since the store was created."""
        return self.engine.stats()
