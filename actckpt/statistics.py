"""`stats` and `reset_stats`: what was moved and rerun, in bytes, counts and seconds."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from actckpt import _frames
from actckpt.engine import native
from actckpt.runtime import stores
from actckpt.runtime.counters import counters

__all__ = ["Stats", "reset_stats", "stats"]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums since the last `reset_stats`, and what is held now. Bytes, counts and seconds."""

    #: Bytes moved to a store, each storage once.
    offloaded_bytes: int
    #: Bytes that unpacks asked back.
    reloaded_bytes: int
    #: Bytes of saved tensors that needed no copy, because they share one that was moved.
    deduplicated_bytes: int
    #: Bytes held by all stores now, and at most so far (not reset).
    store_bytes: int
    peak_store_bytes: int
    #: Pinned host memory, other host memory with GPU tensors in it, and spill file now.
    host_bytes: int
    pageable_bytes: int
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
    #: Tensors that stayed because a store was full, failed, or a stream was capturing.
    kept_full: int
    #: Copies to a store that failed; their tensors stayed in memory.
    failed_writes: int
    #: Regions run again in backward.
    rerun_regions: int
    #: Operators executed again for a region with a policy.
    replayed_operators: int
    #: Values that a policy wanted recomputed, and that were kept because nothing recorded makes them again.
    kept_opaque: int
    #: Bytes copied because an operator was about to overwrite them in place while backward still needs them.
    copied_on_write_bytes: int


_baseline: dict[str, float] = {}


def _totals() -> dict[str, float]:
    totals: dict[str, float] = dict(_frames.offload_sums())
    totals["rerun_regions"] = _frames.num_reruns()
    for name in ("replayed_operators", "kept_opaque", "copied_on_write_bytes"):
        totals[name] = counters.value(name)
    totals["replayed_operators"] += _frames.num_replayed()
    for name in ("prefetched_reloads", "late_reloads", "failed_writes"):
        totals[name] = 0
    totals["stall_seconds"] = 0.0
    for figures in _engines():
        totals["prefetched_reloads"] += figures.num_prefetched
        totals["late_reloads"] += figures.num_late
        totals["stall_seconds"] += figures.stall_seconds
        totals["failed_writes"] += figures.num_failed_writes
    return totals


def _engines() -> Iterator[native.HostStats | native.DeviceStats]:
    cpu, cuda = stores.existing("disk"), stores.existing("host")
    if isinstance(cpu, stores.CpuBackend):
        yield cpu.store.stats()
    if isinstance(cuda, stores.CudaBackend):
        yield cuda.engine.stats()


def stats() -> Stats:
    """Return the figures of this process.

    Example::

        >>> import actckpt
        >>> actckpt.reset_stats()
        >>> actckpt.stats().rerun_regions
        0
    """
    totals = _totals()
    sums = {name: type(value)(value - _baseline.get(name, 0)) for name, value in totals.items()}
    held: Counter[str] = Counter()
    for figures in _engines():
        held["inflight"] += figures.inflight_bytes
        held["peak_inflight"] += figures.peak_inflight_bytes
        if isinstance(figures, native.DeviceStats):
            held["disk"] += figures.disk_bytes
            held["pageable"] += figures.pageable_bytes
            held["host"] += figures.bounce_bytes
            held["store"] += figures.disk_bytes + figures.pageable_bytes
            held["peak_store"] += figures.peak_tier_bytes
        else:
            held["disk"] += figures.stored_bytes
            held["store"] += figures.stored_bytes
            held["peak_store"] += figures.peak_stored_bytes
    cuda = stores.existing("host")
    if isinstance(cuda, stores.CudaBackend):
        pool = cuda.engine.pool_stats()
        held["host"] += pool.pool_bytes
        held["store"] += pool.stored_bytes
        held["peak_store"] += pool.peak_stored_bytes
    return Stats(
        offloaded_bytes=int(sums["offloaded_bytes"]),
        reloaded_bytes=int(sums["reloaded_bytes"]),
        deduplicated_bytes=int(sums["deduplicated_bytes"]),
        store_bytes=held["store"],
        peak_store_bytes=held["peak_store"],
        host_bytes=held["host"],
        pageable_bytes=held["pageable"],
        disk_bytes=held["disk"],
        inflight_bytes=held["inflight"],
        peak_inflight_bytes=held["peak_inflight"],
        prefetched_reloads=int(sums["prefetched_reloads"]),
        late_reloads=int(sums["late_reloads"]),
        stall_seconds=float(sums["stall_seconds"]),
        kept_full=int(sums["kept_full"]),
        failed_writes=int(sums["failed_writes"]),
        rerun_regions=int(sums["rerun_regions"]),
        replayed_operators=int(sums["replayed_operators"]),
        kept_opaque=int(sums["kept_opaque"]),
        copied_on_write_bytes=int(sums["copied_on_write_bytes"]),
    )


def reset_stats() -> None:
    """Let the sums begin at zero again. What is held now, and peaks, stay."""
    _baseline.clear()
    _baseline.update(_totals())
