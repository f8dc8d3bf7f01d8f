"""The spill file of the current settings: both stores write to it, since they share one limit."""

import threading

from actckpt import _C, config
from actckpt._offload import notices

__all__ = ["spill_file"]

_UNLIMITED = (1 << 64) - 1

_lock = threading.Lock()
#: By generation of the settings; at most one entry.
_files: dict[int, _C.SpillFile] = {}


def spill_file(settings: config.Settings) -> _C.SpillFile:
    """Return the spill file, created at first use.

    Raises:
        OffloadError: no file can be created in the folder of the settings.
    """
    with _lock:
        known = _files.get(config.generation)
        if known is None:
            folder = settings.spill_folder
            if _C.is_memory_folder(folder):
                notices.tell_of_memory_folder(folder)
            limit = _UNLIMITED if settings.disk_limit is None else settings.disk_limit
            known = _C.SpillFile(folder, limit_bytes=limit)
            _files.clear()
            _files[config.generation] = known
        return known
