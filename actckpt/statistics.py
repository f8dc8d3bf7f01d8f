"""`stats` and `reset_stats`: what was moved and rerun, in bytes, counts and seconds."""

import dataclasses

from actckpt import _frames
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
    #: Pinned host memory and spill file now.
    host_bytes: int
    disk_bytes: int
    #: Bytes on their way to a store now, and at most so far (not reset).
    inflight_bytes: int
    peak_inflight_bytes: int
    #: Reloads that were finished when backward asked, and those it had to wait for (CPU tensors).
    prefetched_reloads: int
    late_reloads: int
    #: Time that callers waited for copies (CPU tensors).
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
    cpu = stores.existing("disk")
    if isinstance(cpu, stores.CpuBackend):
        engine = cpu.store.stats()
        totals["prefetched_reloads"] = engine.num_prefetched
        totals["late_reloads"] = engine.num_late
        totals["stall_seconds"] = engine.stall_seconds
        totals["failed_writes"] = engine.num_failed_writes
    return totals


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
    disk_bytes = host_bytes = store_bytes = peak = inflight = peak_inflight = 0
    cpu, cuda = stores.existing("disk"), stores.existing("host")
    if isinstance(cpu, stores.CpuBackend):
        engine = cpu.store.stats()
        disk_bytes, peak = engine.stored_bytes, engine.peak_stored_bytes
        store_bytes += engine.stored_bytes
        inflight, peak_inflight = engine.inflight_bytes, engine.peak_inflight_bytes
    if isinstance(cuda, stores.CudaBackend):
        pool, device = cuda.engine.pool_stats(), cuda.engine.stats()
        host_bytes = pool.pool_bytes
        store_bytes += pool.stored_bytes
        peak += pool.peak_stored_bytes
        inflight += device.inflight_bytes
        peak_inflight += device.peak_inflight_bytes
    return Stats(
        offloaded_bytes=int(sums["offloaded_bytes"]),
        reloaded_bytes=int(sums["reloaded_bytes"]),
        deduplicated_bytes=int(sums["deduplicated_bytes"]),
        store_bytes=store_bytes,
        peak_store_bytes=peak,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        inflight_bytes=inflight,
        peak_inflight_bytes=peak_inflight,
        prefetched_reloads=int(sums.get("prefetched_reloads", 0)),
        late_reloads=int(sums.get("late_reloads", 0)),
        stall_seconds=float(sums.get("stall_seconds", 0.0)),
        kept_full=int(sums["kept_full"]),
        failed_writes=int(sums.get("failed_writes", 0)),
        rerun_regions=int(sums["rerun_regions"]),
        replayed_operators=int(sums["replayed_operators"]),
        kept_opaque=int(sums["kept_opaque"]),
        copied_on_write_bytes=int(sums["copied_on_write_bytes"]),
    )


def reset_stats() -> None:
    """Let the sums begin at zero again. What is held now, and peaks, stay."""
    _baseline.clear()
    _baseline.update(_totals())
