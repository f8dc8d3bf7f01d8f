"""Store failures that lose nothing: logged once per process and reason, so that steps do not fill the log."""

import logging
import threading

from actckpt import _C, config
from actckpt._core.accelerator import Accelerator
from actckpt._core.warning_texts import WarningText

__all__ = [
    "tell_kept",
    "tell_no_store",
    "tell_of_disk",
    "tell_of_memory_folder",
    "tell_of_threads",
    "tell_of_writes",
]

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_warned: set[tuple[WarningText, str]] = set()


_IN_MEMORY = WarningText(
    "The spill folder {folder} is in memory (tmpfs): offloading to it frees nothing.",
    "Set another one with actckpt.configure(spill_dir=...).",
    per="folder",
)
_FEW_THREADS = WarningText(
    "Only {granted} of {requested} threads to copy to the spill file could be made: {reason}. {consequence}",
    "Raise the limit of threads (ulimit -u, pids.max of the cgroup) or of memory (ulimit -v), or ask for fewer with "
    "configure(num_workers=...).",
    per="process",
)
_DISK_FULL = WarningText(
    "The spill file is full: what could not be written stays in memory; nothing is lost. {error}.",
    "Raise disk_limit, or set spill_dir to a larger file system; see kept_full and failed_writes of actckpt.stats().",
    per="process",
)
_DISK_BROKEN = WarningText(
    "Writing to the spill file fails: what could not be written stays in memory; nothing is lost. {error}.",
    "Check the disk, or set another spill_dir; actckpt.stats().failed_writes counts these copies.",
    per="process",
)
_STORE_FULL = WarningText(
    "No store has room for {tensor} MiB of a GPU tensor: it stays on the GPU. Pinned memory holds {held} of at "
    "most {limit} MiB.",
    "Raise configure(host_limit=...), or set spill_dir; actckpt.stats().kept_full counts these tensors.",
    per="process",
)
_INTEGRATED = WarningText(
    "Nothing is offloaded to the host: this GPU uses the host's memory, so a copy there frees none. Tensors stay.",
    "Recompute them (policy='recompute', actckpt.checkpoint), or set configure(spill_dir=...) to offload to disk; "
    "actckpt.stats().kept_full counts these tensors.",
    per="process",
)
_CAPTURING = WarningText(
    "Tensors saved while a stream is captured into a CUDA graph are not offloaded: a graph cannot wait for copies "
    "outside of it. They stay on the GPU, in the memory of the graph.",
    "In a capture use policies that recompute, such as policy=[]; actckpt.stats().kept_capturing counts these tensors.",
    per="process",
)
_DEVICE_FAILED = WarningText(
    "A device call of the offload engine failed: nothing is offloaded any more, tensors stay on the GPU. {error}.",
    "Look for an earlier error of the device in this process.",
    per="process",
)
_NO_STORE = WarningText(
    "Values that prefer to be offloaded stay: {reason}",
    "Use a policy that recomputes them if they must not stay.",
    per="type of device",
)
_ON_DISK = WarningText(
    "Pinned host memory is full: GPU tensors go to the spill file, which is slower.",
    "Raise configure(host_limit=...); actckpt.stats().disk_bytes counts what is there.",
    per="process",
)


def _warn_once(text: WarningText, key: str = "", **values: object) -> None:
    with _lock:
        if (text, key) in _warned:
            return
        _warned.add((text, key))
    _log.warning("%s", text.message(**values))


def tell_of_memory_folder(folder: str) -> None:
    _warn_once(_IN_MEMORY, folder, folder=folder)


def tell_of_threads(num_granted: int, why: str, num_asked: int) -> None:
    """Log if the system granted fewer copy threads than requested, and why."""
    if num_granted < num_asked:
        consequence = "They copy all." if num_granted else "Callers copy, once bounce buffers are full."
        _warn_once(_FEW_THREADS, granted=num_granted, requested=num_asked, reason=why, consequence=consequence)


def tell_of_writes(stats: _C.DeviceStats) -> None:
    """Log failed writes, each kind once: a full disk, and a broken one."""
    error = stats.spill_error.rstrip(".")
    if stats.num_full_writes:
        _warn_once(_DISK_FULL, error=error)
    if stats.num_failed_writes > stats.num_full_writes:
        _warn_once(_DISK_BROKEN, error=error)


def _tell_of_full_file(engine: _C.DeviceEngine, nbytes: int) -> None:
    """Log that a tensor stays: the limit refuses it, or failed writes occupy every bounce buffer."""
    stats = engine.stats()
    reason = stats.spill_error.rstrip(".") or f"{nbytes} bytes do not fit beside {stats.disk_bytes}"
    _warn_once(_DISK_FULL, error=reason)


def tell_kept(engine: _C.DeviceEngine, why: _C.Kept, nbytes: int, accelerator: Accelerator | None) -> None:
    """Log why a tensor of an accelerator stays, or one of the CPU, unless that is expected."""
    is_integrated = accelerator is not None and accelerator.is_integrated
    if why == _C.Kept.CAPTURING:
        _warn_once(_CAPTURING)
    elif why == _C.Kept.FULL and is_integrated and config.settings().spill_dir is None:
        _warn_once(_INTEGRATED)
    elif why == _C.Kept.FULL and (is_integrated or accelerator is None):
        _tell_of_full_file(engine, nbytes)
    elif why == _C.Kept.FULL:
        pool = engine.pool_stats()
        sizes = {"tensor": nbytes, "held": pool.stored_bytes, "limit": pool.limit_bytes}
        _warn_once(_STORE_FULL, **{name: f"{size / 2**20:.1f}" for name, size in sizes.items()})
    elif why in (_C.Kept.FAILED, _C.Kept.STRANDED):
        _warn_once(_DEVICE_FAILED, error=engine.stats().last_error.rstrip("."))


def tell_no_store(device_type: str, why: str) -> None:
    """Log why a value that prefers to be offloaded stays."""
    _warn_once(_NO_STORE, device_type, reason=why)


def tell_of_disk(accelerator: Accelerator) -> None:
    """Log that tensors of an accelerator go to disk, unless they could go nowhere else."""
    if not accelerator.is_integrated:
        _warn_once(_ON_DISK)
