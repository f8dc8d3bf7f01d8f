"""Store failures that lose nothing: logged once per process and reason, so that steps do not fill the log."""

import logging
import threading

from actckpt import _C

__all__ = [
    "tell_kept",
    "tell_no_store",
    "tell_of_disk",
    "tell_of_failed_writes",
    "tell_of_memory_folder",
    "tell_of_threads",
    "tell_of_writes",
]

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_warned: set[str] = set()


def _warn_once(reason: str, message: str, *args: object) -> None:
    with _lock:
        if reason in _warned:
            return
        _warned.add(reason)
    _log.warning(message, *args)


def tell_of_memory_folder(folder: str) -> None:
    _warn_once(
        f"in memory: {folder}",
        "The spill folder %s is in memory (tmpfs): offloading to it frees nothing. Set another one with "
        "actckpt.configure(spill_dir=...).",
        folder,
    )


def tell_of_threads(num_granted: int, why: str, num_asked: int) -> None:
    """Log if the system granted fewer copy threads than requested, and why."""
    if num_granted < num_asked:
        _warn_once(
            "threads",
            "Only %d of %d threads to copy to the spill file could be made: %s. %s Raise the limit of threads (ulimit "
            "-u, pids.max of the cgroup) or of memory (ulimit -v), or ask for fewer with configure(num_workers=...).",
            num_granted,
            num_asked,
            why,
            "They copy all." if num_granted else "Callers copy, once max_inflight bytes wait.",
        )


def tell_of_writes(stats: _C.CpuStats) -> None:
    """Log failed writes of CPU tensors, except those whose source was freed."""
    tell_of_failed_writes(stats.num_failed_writes - stats.num_gone_sources, stats.num_full_writes, stats.last_error)


def tell_of_failed_writes(num_failed: int, num_full: int, error: str) -> None:
    """Log failed writes, each kind once: a full disk, and a broken one."""
    kept = "what could not be written stays in memory; nothing is lost. Shown once; actckpt.stats() counts it."
    if num_full:
        _warn_once("disk full", "The spill file is full: %s %s", kept, error)
    if num_failed > num_full:
        _warn_once("disk broken", "Writing to the spill file fails: %s %s", kept, error)


def tell_kept(engine: _C.DeviceEngine, why: _C.Kept, nbytes: int) -> None:
    """Log why a device tensor stays, unless that is expected."""
    if why == _C.Kept.FULL:
        pool = engine.pool_stats()
        _warn_once(
            "full",
            "No store has room for %.1f MiB of a GPU tensor: it stays on the GPU. Pinned memory holds %.1f of at "
            "most %.1f MiB. Raise configure(host_limit=...), or set spill_dir. Shown once; "
            "actckpt.stats().kept_full counts.",
            nbytes / 2**20,
            pool.stored_bytes / 2**20,
            pool.limit_bytes / 2**20,
        )
    elif why in (_C.Kept.FAILED, _C.Kept.STRANDED):
        _warn_once(
            "device",
            "A device call of the offload engine failed: nothing is moved any more, tensors stay on the GPU. %s",
            engine.stats().last_error,
        )


def tell_no_store(device_type: str, why: str) -> None:
    """Log why a value that prefers to be offloaded stays."""
    _warn_once(f"no store: {device_type}", "What prefers to be offloaded stays: %s", why)


def tell_of_disk() -> None:
    _warn_once(
        "disk",
        "Pinned host memory is full: GPU tensors go to the spill file, which is slower. Raise "
        "configure(host_limit=...) to avoid it. Shown once; actckpt.stats() counts it.",
    )
