"""`stats` and `reset_stats`: offloads and recomputations in bytes, counts and seconds."""

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
    """Sums since the last `reset_stats`, and current memory. Bytes, counts and seconds. Prints what is not zero.

    What `plan`, `compare`, `estimate` and the first step of `apply(budget=...)` run for measurements does not count,
    nor what other threads do meanwhile.
    """

    #: Bytes passed to a store, each storage once; including those that then stayed because it was full or failed.
    offloaded_bytes: int
    #: Bytes loaded by unpacks, in each backward. An offloaded value that others are replayed from is loaded again if a
    #: window (NOTE [ Windows ]) has no room for it.
    reloaded_bytes: int
    #: Bytes of saved tensors that needed no copy, because they share one.
    deduplicated_bytes: int
    #: Bytes held by all stores now, and at most so far (not reset).
    store_bytes: int
    peak_store_bytes: int
    #: Current host memory of stores and their bounce buffers, and spill file size.
    host_bytes: int
    disk_bytes: int
    #: In-flight bytes now, and at most so far (not reset).
    inflight_bytes: int
    peak_inflight_bytes: int
    #: Reloads that were finished or in flight when backward needed them, and reloads that it waited for.
    prefetched_reloads: int
    late_reloads: int
    #: Time that callers, and streams of the program, waited for copies.
    stall_seconds: float
    #: Tensors that stayed because they are below `min_bytes`, and `offload` blocks that offloaded nothing.
    kept_small: int
    idle_offloads: int
    #: Tensors that stayed because a limit was reached.
    kept_full: int
    #: Tensors that stayed because a call of the device failed.
    kept_failed: int
    #: Tensors of `PREFER_OFFLOAD` (torch: `PREFER_CPU_OFFLOAD`) that stayed because earlier copies were not done.
    kept_busy: int
    #: Tensors that stayed because their stream was being captured into a CUDA graph.
    kept_capturing: int
    #: Failed copies to disk, including for lack of space; their bytes stayed in host memory.
    failed_writes: int
    #: Regions rerun in backward.
    rerun_regions: int
    #: Operators replayed for a region with a policy.
    replayed_operators: int
    #: Values that a policy recomputes but that were kept because no recorded operator makes them.
    kept_opaque: int
    #: Bytes copied because an operator was about to overwrite them in place while backward still needs them.
    copied_on_write_bytes: int
    #: Reruns, replays and reloads in backward that ran out of memory and ran once more.
    rescued_recomputations: int
    #: Forwards of blocks under a budget that ran out of memory and ran once more.
    rescued_forwards: int

    def _texts(self) -> dict[str, str]:
        """Return the fields that are not zero, with their units."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _with_unit(name, value) for name, value in fields.items() if value}

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
    """The number of running measurements, and the sums when the first of them started."""

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
    rescued = ("rescued_recomputations", "rescued_forwards")
    for name in ("idle_offloads", "kept_opaque", "copied_on_write_bytes", *rescued):
        totals[name] = counters.value(name)
    totals["replayed_operators"] = _C.num_replayed()
    of_stores = counts.sums()
    for name in _OF_STORES:
        totals[name] = of_stores[name]
    return totals


def _engines() -> Iterator[_C.DeviceEngine]:
    for store in (stores.cpu_store(), stores.device_store()):
        if store is not None:
            yield store.engine


def stats() -> Stats:
    """Return the statistics of this process.

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
    """Exclude the body, a measurement, from the sums: no step of the user runs in it."""
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
    for engine in _engines():
        counted, pool = engine.stats(), engine.pool_stats()
        held["inflight_bytes"] += counted.inflight_bytes
        held["peak_inflight_bytes"] += counted.peak_inflight_bytes
        held["disk_bytes"] += counted.disk_bytes
        held["host_bytes"] += counted.bounce_bytes + pool.pool_bytes
        held["store_bytes"] += counted.disk_bytes + pool.stored_bytes
        held["peak_store_bytes"] += counted.peak_disk_bytes + pool.peak_stored_bytes
    return held


def reset_stats() -> None:
    """Reset the sums to zero. Current memory and peaks stay."""
    _baseline.clear()
    _baseline.update(_totals())
