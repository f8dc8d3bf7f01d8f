"""One kind of accelerator: its devices, streams, memory and random numbers, through torch's device-independent API."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core.nvml import GpuFacts
from actckpt._core.torch_private import untraced

__all__ = ["Accelerator", "DeviceGenerator", "MemoryLabels"]


class MemoryLabels(NamedTuple):
    """Functions that set and get the label of the allocator's next allocations."""

    set: Callable[[str], None]
    get: Callable[[], str]


class Accelerator:
    """One kind of accelerator.

    Args:
        device_type: as in `torch.device(device_type, 0)`.
    """

    #: The driver library that the engine opens for copies, by path or soname; None: the engine has no backend for it.
    driver_library: str | None = None

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._streams: dict[tuple[int, int], torch.Stream] = {}
        #: Devices that were unused at the last query by a region; None: never queried.
        self._unused: list[int] | None = None
        self._used_generators: tuple[torch.Generator | DeviceGenerator, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_one_of, (self.device_type,)  # one instance per kind, also in copies of objects that refer to it

    @property
    def module(self) -> Any:
        """The device module, such as `torch.cuda`; None if it has none."""
        return getattr(torch, self.device_type, None)

    def _has(self, name: str) -> bool:
        return hasattr(self.module, name)

    # Devices

    def is_available(self) -> bool:
        """Whether at least one device is usable."""
        return self._has("is_available") and bool(self.module.is_available())

    def device_count(self) -> int:
        """Return the number of devices."""
        return int(self.module.device_count())

    def device_at(self, index: int) -> torch.device:
        """Return a device by its index."""
        return torch.device(self.device_type, index)

    def name_of(self, device: torch.device) -> str:
        """Return the device's name."""
        return str(self.module.get_device_name(device)) if self._has("get_device_name") else str(device)

    @functools.cached_property
    def is_integrated(self) -> bool:
        """Whether all devices use the host's memory: a copy to the host frees nothing."""
        return False

    def facts_of(self, device: torch.device) -> GpuFacts | None:
        """Return facts from the vendor's management library; None if there is none."""
        return None

    def current_index(self) -> int | None:
        """Return the index of the current device; None until a device has been used."""
        is_ready = getattr(self.module, "is_initialized" if self._has("is_initialized") else "is_available", None)
        return torch.accelerator.current_device_index() if is_ready is not None and is_ready() else None

    def at_index(self, index: int) -> AbstractContextManager[Any]:
        """Return a context in which that device is current."""
        return torch.accelerator.device_index(index)

    @functools.cached_property
    def times_events(self) -> bool:
        """Whether events measure the time between them."""
        try:
            events = [torch.Event(self.device_type, enable_timing=True) for _ in range(2)]
            for event in events:
                event.record()
            events[1].synchronize()
            events[0].elapsed_time(events[1])
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def host_seconds(self) -> float:
        """Return the host time in seconds, on a clock comparable to that of events."""
        return time.perf_counter()

    def memory_labels(self) -> MemoryLabels | None:
        """Return the functions that label allocations in memory snapshots; None if there are none."""
        return None

    # Streams

    @untraced
    def stream_handle(self, index: int) -> int:
        """Return the driver library's handle of a device's current stream. Called for every tensor that moves."""
        stream = torch.accelerator.current_stream(index)
        handle = int(stream.native_handle)  # type: ignore[attr-defined]  # from torch 2.11 on, not in its stubs
        self._streams.setdefault((index, handle), stream)
        return handle

    @untraced
    def stream_at(self, handle: int, index: int) -> torch.Stream:
        """Return the stream for a handle from `stream_handle`."""
        return self._streams[index, handle]

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Return a context in which that stream and its device are current."""
        return stream

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work of a device. Not called in a forward."""
        torch.accelerator.synchronize(device)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return (
            self._has("is_current_stream_capturing")
            and self.current_index() is not None
            and bool(self.module.is_current_stream_capturing())
        )

    # Memory, in bytes

    @untraced
    def allocate_on(self, handle: int, device: torch.device, nbytes: int) -> _C.Bytes:
        """Return new memory on a device, allocated on the stream of a handle."""
        assert device.index is not None
        with self.on_stream(self.stream_at(handle, device.index)):
            return _C.allocate_bytes(nbytes, device)

    @functools.cached_property
    def counts_memory(self) -> bool:
        """Whether the device allocator has statistics."""
        try:
            torch.accelerator.memory_allocated()
        except RuntimeError:  # another allocator, without statistics
            return False
        return True

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes that tensors hold. Needs `counts_memory`, as the next two."""
        return torch.accelerator.memory_allocated(device)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the peak of `allocated_bytes` since `reset_peak`."""
        return torch.accelerator.max_memory_allocated(device)

    def reset_peak(self, device: torch.device, *, waits: bool = True) -> int:
        """Reset the peak to the current `allocated_bytes`, and return that; if `waits`, after all work is done."""
        if waits:
            self.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return self.allocated_bytes(device)

    def memory_info(self, device: torch.device) -> tuple[int, int] | None:
        """Return free and total bytes of the device; None if unknown."""
        tell = getattr(torch.accelerator, "get_memory_info", None)  # from torch 2.10 on
        tell = tell or getattr(self.module, "mem_get_info", None)
        try:
            return None if tell is None else tell(device)
        except RuntimeError:  # as in `counts_memory`
            return None

    def unused_bytes(self, device: torch.device) -> int:
        """Return the bytes that this process's allocator caches."""
        if not self.counts_memory:
            return 0
        return torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        torch.accelerator.empty_cache()

    # Random numbers

    def generator_at(self, index: int) -> torch.Generator | DeviceGenerator | None:
        """Return a device's default generator, or a stand-in; None if the device has no random numbers."""
        generators = getattr(self.module, "default_generators", None)
        if generators is not None:
            return generators[index] if len(generators) else None  # empty until a device has been used
        return DeviceGenerator(self, index) if self._tells_random_state() else None

    def generators(self) -> list[DeviceGenerator]:
        """Return stand-ins for the default generators of all devices; this initializes the devices."""
        return [DeviceGenerator(self, i) for i in range(self.device_count())] if self._tells_random_state() else []

    def is_used(self, index: int) -> bool:
        """Whether this process may have used a device; does not initialize it."""
        return True

    def used_generators(self) -> tuple[torch.Generator | DeviceGenerator, ...]:
        """Return the default generators, or stand-ins, of all devices in use. Called for every region."""
        if self._unused is None:
            if self.current_index() is None:
                return ()
            self._unused = list(range(self.device_count())) if self._has("device_count") else []
        new = [index for index in self._unused if self.is_used(index)] if self._unused else ()
        if new:
            self._unused = [index for index in self._unused if index not in new]
            made = (*self._used_generators, *map(self.generator_at, new))
            self._used_generators = tuple(dict.fromkeys(generator for generator in made if generator is not None))
        return self._used_generators

    def _tells_random_state(self) -> bool:
        return self._has("get_rng_state") and self._has("set_rng_state")


class DeviceGenerator:
    """Stand-in for a device's default generator: gets and sets its state through the device module."""

    def __init__(self, accelerator: Accelerator, index: int) -> None:
        self._accelerator, self._index = accelerator, index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceGenerator) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, int]:
        return self._accelerator.device_type, self._index

    def get_state(self) -> Tensor:
        """Return the state as a byte tensor."""
        state: Tensor = self._accelerator.module.get_rng_state(self._index)
        return state

    def set_state(self, state: Tensor) -> None:
        """Set the state to one that `get_state` returned."""
        self._accelerator.module.set_rng_state(state, self._index)


def _the_one_of(device_type: str) -> Accelerator | None:
    from actckpt._core.devices import accelerator_of  # which imports this module

    return accelerator_of(device_type)
