"""Measured bandwidth of offloading, for cost tables.

Plans offload if there is a store for the model's tensors. Devices with an engine backend offload to pinned memory,
unless they are integrated or `configure(host_limit=0)` allows none. A CPU offloads to disk, and only if
`configure(spill_dir=...)` names a folder or a pin says so.

Pieces of the smallest size that plans offload are copied out and back, on a device in both directions at once, on their
own streams and timed by their events. A slow piece counts, since training has other traffic. This is done once per
device and settings, when the first plan is made. It needs two pieces of device memory, and waits for the device.
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
#: The size of device pieces as a fraction of device memory, and its maximum.
_PIECES_OF_A_DEVICE, _LARGEST_PIECE_BYTES = 4096, 16 << 20
#: The share of pieces that are slower than the one that counts.
_QUANTILE = 0.2


@dataclasses.dataclass(frozen=True)
class _Links:
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    #: Capacity of the store; None: no limit.
    host_bytes: float | None


def is_linked(device: torch.device, pins: Pins | None) -> bool:
    """Return whether plans may offload tensors of a device."""
    if device.type == "cpu":
        return config.settings().spill_dir is not None or pins_offload(pins)
    can_pin = not devices.is_integrated(device.type) and config.settings().host_limit != 0
    return stores.why_none(device.type) == "" and can_pin


def pins_offload(pins: Pins | None) -> bool:
    """Return whether a pin says that something is offloaded."""
    return any(action in (Action.OFFLOAD, Action.OFFLOAD.value) for action in (pins or {}).values())


def flush(device: torch.device) -> None:
    """Wait until offloaded bytes are no longer held on the device."""
    if not stores.is_ready(device.type):
        return
    devices.synchronize(device)
    stores.store_for(device.type).poll()


def poll(device: torch.device) -> None:
    """Release the sources of finished copies: without plans that offload, no other call does."""
    if stores.is_ready(device.type):
        stores.store_for(device.type).poll()


def with_links(costs: CostTable, device: torch.device) -> CostTable:
    """Return a cost table with the links of a device."""
    return dataclasses.replace(costs, **dataclasses.asdict(_links(device, config.generation)))


@functools.lru_cache(maxsize=16)
@uncounted()
def _links(device: torch.device, generation: int) -> _Links:
    """Measure the links. `generation` counts changes of the settings."""
    accelerator = devices.accelerator_of(device.type)
    store = stores.store_for(device.type)
    if accelerator is not None:
        return _Links(*_copied(accelerator, device), store.host_bytes)
    settings = config.settings()
    free = shutil.disk_usage(settings.spill_folder).free
    limit = free if settings.disk_limit is None else min(free, settings.disk_limit)
    return _Links(*_spilled(store), float(limit))


def _copied(accelerator: Accelerator, device: torch.device) -> tuple[float, float]:
    """Return the bandwidths from a device to pinned memory and back, in bytes per second."""
    nbytes = _piece_bytes(accelerator, device)
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    accelerator.synchronize(device)
    ways = [(torch.Stream(device=device), pinned[0], here[0]), (torch.Stream(device=device), here[1], pinned[1])]
    moments: list[list[devices.Moment]] = [[], []]
    for number in range(_NUM_PIECES + 1):
        for (stream, target, source), events in zip(ways, moments, strict=True):
            with stream:
                if number:
                    target.copy_(source, non_blocking=True)
                events.append(devices.moment(device))
    accelerator.synchronize(device)
    out, back = (_rate(nbytes, [devices.seconds_between(*pair) for pair in itertools.pairwise(m)]) for m in moments)
    return out, back


def _piece_bytes(accelerator: Accelerator, device: torch.device) -> int:
    """Return the copy size to measure, which grows with the memory of the device as offloaded values do."""
    memory = accelerator.memory_info(device)
    part = 0 if memory is None else memory[1] // _PIECES_OF_A_DEVICE
    return min(max(part, session.DEFAULT_MIN_BYTES), _LARGEST_PIECE_BYTES)


def _rate(nbytes: int, seconds: list[float]) -> float:
    """Return the bandwidth of a slow piece of `nbytes`, in bytes per second."""
    slow = sorted(seconds)[int((1 - _QUANTILE) * len(seconds))]
    return nbytes / max(slow, 1e-9)


def _spilled(store: CpuStore) -> tuple[float, float]:
    """Return the bandwidths of writing to the spill file and reading back, in bytes per second."""
    nbytes = session.DEFAULT_MIN_BYTES
    pieces = [torch.full((nbytes,), number, dtype=torch.uint8).untyped_storage() for number in range(_NUM_PIECES)]
    began = time.perf_counter()
    put = [store.engine.put(piece.data_ptr(), nbytes, 0, 0, _C.Bytes(piece, 0)) for piece in pieces]
    store.flush()
    written = time.perf_counter()
    tickets = [ticket for ticket in put if isinstance(ticket, _C.DeviceTicket)]
    buffers = [_C.Bytes(torch.empty(nbytes, dtype=torch.uint8).untyped_storage(), 0) for _ in tickets]
    loaded = time.perf_counter()
    for ticket, buffer in zip(tickets, buffers, strict=True):
        ticket.load(0, 0, buffer.storage.data_ptr(), buffer, urgent=True)
        ticket.get(0, 0)
    read = time.perf_counter()
    moved_bytes = nbytes * len(tickets)
    return moved_bytes / max(written - began, 1e-9), moved_bytes / max(read - loaded, 1e-9)
