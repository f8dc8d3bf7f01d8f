"""`stats` and `reset_stats`: what was moved and rerun, in bytes, counts and seconds."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from actckpt import _C
from actckpt._core.counters import counters
from actckpt._offload import counts, stores
from actckpt._text.sizes import format_bytes, format_seconds

__all__ = ["Stats", "reset_stats", "stats", "uncounted"]


@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Sums since the last `reset_stats`, and what is held now. Bytes, counts and seconds. Prints what is not zero.

    What `plan`, `compare`, `estimate` and the first step of `apply(budget=...)` run in order to measure is not in the
    sums, nor is what other threads do meanwhile.
    """

    #: Bytes handed to a store, each storage once; also those that then stayed because it was full or failed.
    offloaded_bytes: int
    #: Bytes that unpacks asked back, in each backward. An offloaded value that others are replayed from is read again
    #: where a window (NOTE [ Windows ]) has no room for it.
    reloaded_bytes: int
    #: Bytes of saved tensors that needed no copy, because they share one that was moved.
    deduplicated_bytes: int
    #: Bytes held by all stores now, and at most so far (not reset).
    store_bytes: int
    peak_store_bytes: int
    #: Pinned host memory and spill file now.
    host_bytes: int
    disk_bytes: int
    #: Bytes on their way to a store now, and at most so far (not reset).
    inflight_bytes: int
    peak_inflight_bytes: int
    #: Reloads that were finished (CPU tensors) or on their way (GPU tensors) when backward asked, and waits that
    #: took their time.
    prefetched_reloads: int
    late_reloads: int
    #: Time that callers, and streams of the program, waited for copies.
    stall_seconds: float
    #: Tensors that stayed because they have less than `min_bytes`, and `offload` blocks that moved nothing at all.
    kept_small: int
    idle_offloads: int
    #: Tensors that stayed because a limit was reached, or the disk was full.
    kept_full: int
    #: Tensors that stayed because a copy or a call of the device failed.
    kept_failed: int
    #: Tensors of `PREFER_OFFLOAD` (torch: `PREFER_CPU_OFFLOAD`) that stayed because the copies
    #: before them were not done.
    kept_busy: int
    #: Tensors that stayed because their stream was being captured into a CUDA graph.
    kept_capturing: int
    #: Copies to disk that failed, also for want of room; their bytes stayed in memory.
    failed_writes: int
    #: Regions run again in backward.
    rerun_regions: int
    #: Operators executed again for a region with a policy.
    replayed_operators: int
    #: Values that a policy wanted recomputed, and that were kept because nothing recorded makes them again.
    kept_opaque: int
    #: Bytes copied because an operator was about to overwrite them in place while backward still needs them.
    copied_on_write_bytes: int
    #: Reruns, replays and reloads in backward that ran out of memory and ran once more.
    rescued_recomputations: int

    def _texts(self) -> dict[str, str]:
        """Return the fields that are not zero, with their units."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _with_unit(name, value) for name, value in found.items() if value}

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={text}' for name, text in self._texts().items())})"

    def __str__(self) -> str:
        texts = self._texts()
        width = max(map(len, texts), default=0)
        return (
            "\n".join(f"{name:{width}}  {text}" for name, text in texts.items()) or "nothing moved, rerun or replayed"
        )


def _with_unit(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_seconds") else str(value)


_baseline: dict[str, float] = {}


class _Measuring:
    """How many callers measure now, and the sums that there were when the first of them began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.sums: dict[str, float] = {}


_measuring = _Measuring()

_OF_STORES = (
    "prefetched_reloads",
    "late_reloads",
    "stall_seconds",
    "kept_full",
    "kept_failed",
    "kept_busy",
    "kept_capturing",
    "failed_writes",
)


_HELD = (
    *("store_bytes", "peak_store_bytes", "host_bytes", "disk_bytes"),
    *("inflight_bytes", "peak_inflight_bytes"),
)


def _totals() -> dict[str, float]:
    totals: dict[str, float] = dict(_C.offload_sums())
    totals["rerun_regions"] = _C.num_reruns()
    for name in ("idle_offloads", "kept_opaque", "copied_on_write_bytes", "rescued_recomputations"):
        totals[name] = counters.value(name)
    totals["replayed_operators"] = _C.num_replayed()
    of_stores = counts.sums()
    for name in _OF_STORES:
        totals[name] = of_stores[name]
    return totals


def _engines() -> Iterator[_C.HostStats | _C.DeviceStats]:
    cpu, device = stores.cpu_store(), stores.device_store()
    if cpu is not None:
        yield cpu.stats()
    if device is not None:
        yield device.engine.stats()


def stats() -> Stats:
    """Return the figures of this process.

    Example::

        >>> import actckpt
        >>> actckpt.reset_stats()
        >>> actckpt.stats().rerun_regions
        0
    """
    sums = _sums()
    stall_seconds = float(sums.pop("stall_seconds"))
    counts_and_bytes = {name: int(value) for name, value in sums.items()}
    return Stats(stall_seconds=stall_seconds, **counts_and_bytes, **_held_bytes())


def _sums() -> dict[str, float]:
    return {name: value - _baseline.get(name, 0) for name, value in _totals().items()}


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Leave the sums as they are before the body, which measures: no step of the user runs in it."""
    with _measuring.lock:
        if not _measuring.depth:
            _measuring.sums = _sums()
        _measuring.depth += 1
    try:
        yield
    finally:
        with _measuring.lock:
            _measuring.depth -= 1
            if not _measuring.depth:
                _baseline.update({name: value - _measuring.sums[name] for name, value in _totals().items()})


def _held_bytes() -> dict[str, int]:
    """Return the fields that are not sums."""
    held = dict.fromkeys(_HELD, 0)
    for found in _engines():
        held["inflight_bytes"] += found.inflight_bytes
        held["peak_inflight_bytes"] += found.peak_inflight_bytes
        if isinstance(found, _C.DeviceStats):
            held["disk_bytes"] += found.disk_bytes
            held["host_bytes"] += found.bounce_bytes
            held["store_bytes"] += found.disk_bytes
            held["peak_store_bytes"] += found.peak_disk_bytes
        else:
            held["disk_bytes"] += found.stored_bytes
            held["store_bytes"] += found.stored_bytes
            held["peak_store_bytes"] += found.peak_stored_bytes
    device = stores.device_store()
    if device is not None:
        pool = device.engine.pool_stats()
        held["host_bytes"] += pool.pool_bytes
        held["store_bytes"] += pool.stored_bytes
        held["peak_store_bytes"] += pool.peak_stored_bytes
    return held


def reset_stats() -> None:
    """Let the sums begin at zero again. What is held now, and peaks, stay."""
    _baseline.clear()
    _baseline.update(_totals())
