"""How fast saved tensors leave and come back, as cost tables say it.

NOTE [ Measuring links ]

Rule 1. Plans offload where there is a store for the model's tensors: on devices that the engine has a backend for, to
        pinned memory; on a CPU to disk, only where `configure(spill_dir=...)` names a folder or a pin says so.
Rule 2. Pieces of the smallest size that plans offload are copied out and back, on a device in both directions at once,
        on streams of their own and timed by their events. Of all pieces a slow one counts: training has other traffic.
Rule 3. That is done once for a device and settings, when the first plan is made. It needs two pieces of its memory and
        waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import time

import torch

from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._offload import session, stores
from actckpt._offload.cpu import CpuStore
from actckpt.action import Action
from actckpt.planner.costs import CostTable
from actckpt.planner.pins import Pins
from actckpt.statistics import uncounted

__all__ = ["Pins", "flush", "is_linked", "pins_offload", "poll", "with_links"]

_NUM_PIECES = 16
#: Pieces of a device are this part of its memory, and at most so large.
_PIECES_OF_A_DEVICE, _LARGEST_PIECE_BYTES = 4096, 16 << 20
#: The share of pieces that are slower than what counts.
_QUANTILE = 0.2


@dataclasses.dataclass(frozen=True)
class _Links:
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    #: Most bytes in the store; None: no limit.
    host_bytes: float | None


def is_linked(device: torch.device, pins: Pins | None) -> bool:
    """Return whether plans may offload tensors of a device (Rule 1)."""
    if device.type == "cpu":
        return config.settings().spill_dir is not None or pins_offload(pins)
    return stores.why_none(device.type) == ""


def pins_offload(pins: Pins | None) -> bool:
    """Return whether a pin says that something is offloaded."""
    return any(action in (Action.OFFLOAD, Action.OFFLOAD.value) for action in (pins or {}).values())


def flush(device: torch.device) -> None:
    """Wait until nothing that was moved is still held on the device."""
    if not stores.is_ready(device.type):
        return
    devices.synchronize(device)
    store = stores.store_for(device.type)
    if isinstance(store, CpuStore):
        store.flush()
    store.poll()


def poll(device: torch.device) -> None:
    """Release what was moved, as far as its copy has ended: where no plan offloads, no other call does."""
    if stores.is_ready(device.type):
        stores.store_for(device.type).poll()


def with_links(costs: CostTable, device: torch.device) -> CostTable:
    """Return a cost table with the links of a device (Rule 2)."""
    return dataclasses.replace(costs, **dataclasses.asdict(_links(device, config.generation)))


@functools.lru_cache(maxsize=16)
@uncounted()
def _links(device: torch.device, generation: int) -> _Links:
    """Measure. `generation` counts changes of the settings."""
    accelerator = devices.accelerator_of(device.type)
    store = stores.store_for(device.type)
    if accelerator is not None:
        return _Links(*_copied(accelerator, device), store.host_bytes)
    settings = config.settings()
    free = shutil.disk_usage(settings.spill_folder).free
    limit = free if settings.disk_limit is None else min(free, settings.disk_limit)
    return _Links(*_spilled(store), float(limit))


def _copied(accelerator: Accelerator, device: torch.device) -> tuple[float, float]:
    """Return the rates of copies from a device to pinned memory and back, in bytes per second."""
    nbytes = _piece_bytes(accelerator, device)
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    accelerator.synchronize(device)
    ways = [(torch.Stream(device=device), pinned[0], here[0]), (torch.Stream(device=device), here[1], pinned[1])]
    moments: list[list[devices.Moment]] = [[], []]
    for number in range(_NUM_PIECES + 1):
        for (stream, target, source), found in zip(ways, moments, strict=True):
            with stream:
                if number:
                    target.copy_(source, non_blocking=True)
                found.append(devices.moment(device))
    accelerator.synchronize(device)
    out, back = (_rate(nbytes, [devices.seconds_between(*pair) for pair in itertools.pairwise(m)]) for m in moments)
    return out, back


def _piece_bytes(accelerator: Accelerator, device: torch.device) -> int:
    """Return the size of copies to measure: as large as what is moved on a device of its size, which is faster then."""
    memory = accelerator.memory_info(device)
    part = 0 if memory is None else memory[1] // _PIECES_OF_A_DEVICE
    return min(max(part, session.DEFAULT_MIN_BYTES), _LARGEST_PIECE_BYTES)


def _rate(nbytes: int, seconds: list[float]) -> float:
    """Return what a slow one of several pieces of so many bytes took, as bytes per second."""
    slow = sorted(seconds)[int((1 - _QUANTILE) * len(seconds))]
    return nbytes / max(slow, 1e-9)


def _spilled(store: CpuStore) -> tuple[float, float]:
    """Return the rates at which pieces are written to the spill file and read back, in bytes per second."""
    nbytes = session.DEFAULT_MIN_BYTES
    pieces = [torch.full((nbytes,), number, dtype=torch.uint8).untyped_storage() for number in range(_NUM_PIECES)]
    before = store.stats().written_bytes
    began = time.perf_counter()
    put = [store.engine.put(piece.data_ptr(), nbytes, store.tier, _C.Bytes(piece, 0)) for piece in pieces]
    store.flush()
    written = time.perf_counter()
    store.poll()
    moved_bytes = store.stats().written_bytes - before
    tickets = [ticket for ticket in put if isinstance(ticket, _C.Ticket)]
    pieces = [torch.empty(nbytes, dtype=torch.uint8).untyped_storage() for _ in tickets]
    loaded = time.perf_counter()
    for ticket, piece in zip(tickets, pieces, strict=True):
        ticket.load(piece.data_ptr(), _C.Bytes(piece, 0))
    read = time.perf_counter()
    return moved_bytes / max(written - began, 1e-9), moved_bytes / max(read - loaded, 1e-9)
