"""Devices: what is asked of the accelerators of this process, by a device or its type.

NOTE [ Accelerators ]

Rule 1. torch has one kind of accelerator per process (`torch.accelerator`), with any number of devices. Whoever needs
        something of it asks here, by the type of a tensor's device: `accelerator_of("cuda")`. Tensors of the CPU, of
        the meta device, and of what torch counts as no accelerator have None.
Rule 2. `Accelerator` (accelerator.py) stands on `torch.accelerator` and the device's module
        (`torch.get_device_module`), with names that torch 2.9 has. A class derived from it says what that cannot, as
        `Cuda` does (cuda.py).
Rule 3. Checkpoints, regions, random state and autocast need no more than that. The engine, which moves tensors to the
        host, needs a backend (`driver_library`): a library that has the calls of csrc/engine/cuda/driver.h, under the
        names and with the meaning of the CUDA driver's, for the same streams and addresses that torch works with. A
        class that names it, given to `register`, is all that another accelerator takes; before torch 2.11, which tells
        the native handles of streams, it also has `stream_handle` and `stream_at` of its own.
Rule 4. Nothing that a forward calls waits for a device: `synchronize` and the figures of memory are for measuring, and
        for memory that is about to be freed.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from actckpt._core import torch_private
from actckpt._core.accelerator import Accelerator, DeviceGenerator
from actckpt._core.cuda import CUDA_LIBRARY, Cuda

__all__ = [
    "CUDA_LIBRARY",
    "Accelerator",
    "Cuda",
    "DeviceGenerator",
    "Moment",
    "accelerator_of",
    "autocast_types",
    "available",
    "counting",
    "current",
    "current_index",
    "generator_of",
    "has_passed",
    "host_seconds",
    "is_capturing",
    "is_on_accelerator",
    "moment",
    "register",
    "seconds_between",
    "synchronize",
    "usable",
    "used_generators",
]

#: By device type: those that were asked for, or registered.
_accelerators: dict[str, Accelerator] = {}


def accelerator_of(device_type: str) -> Accelerator | None:
    """Return the accelerator whose devices are of a type; None for the CPU and for what torch counts as none."""
    found = _accelerators.get(device_type)
    if found is None and device_type not in ("cpu", "meta"):
        own = torch_private.current_accelerator()
        if own is not None and own.type == device_type:
            found = _accelerators[device_type] = Cuda() if device_type == "cuda" else Accelerator(device_type)
    return found


def register(accelerator: Accelerator) -> Callable[[], None]:
    """Use an accelerator for all devices of its type from now on; returns what undoes it."""
    device_type = accelerator.device_type
    before = _accelerators.get(device_type)
    _accelerators[device_type] = accelerator

    def undo() -> None:
        if before is None:
            _accelerators.pop(device_type, None)
        else:
            _accelerators[device_type] = before

    return undo


def counting(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a device if its allocator counts; None where bytes must be counted otherwise."""
    accelerator = accelerator_of(device.type)
    return accelerator if accelerator is not None and accelerator.counts_memory else None


def current() -> Accelerator | None:
    """Return the kind of accelerator that torch was built for or given; its devices may be missing here."""
    own = torch_private.current_accelerator()
    return None if own is None else accelerator_of(own.type)


def available() -> Accelerator | None:
    """Return the kind of accelerator of which there is a device here; None if there is none."""
    accelerator = current()
    return accelerator if accelerator is not None and accelerator.is_available() else None


def usable(name: str) -> torch.device:
    """Return a device of this machine by its name; "auto" is the accelerator where there is one.

    Raises:
        ValueError: there is none of that name.
    """
    accelerator = available()
    if name == "auto":
        return torch.device("cpu" if accelerator is None else accelerator.device_type)
    names = ["cpu"]
    if accelerator is not None:
        names += [str(accelerator.device_at(index)) for index in range(accelerator.device_count())]
    if name not in (*names, names[-1].partition(":")[0]):
        raise ValueError(f"The device {name!r} cannot be used here; usable are auto, {', '.join(names)}.")
    return torch.device(name)


def current_index() -> int | None:
    """Return the number of the current device; None as long as no device was used. Every region asks."""
    if torch_private.current_accelerator() is None:
        return None
    accelerator = current()
    return None if accelerator is None else accelerator.current_index()


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    accelerator = current()
    return accelerator is not None and accelerator.is_capturing()


def is_on_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor has bytes, and not on the CPU."""
    return not (tensor.is_cpu or tensor.is_meta)


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device; the CPU has none left."""
    accelerator = accelerator_of(device.type)
    if accelerator is not None:
        accelerator.synchronize(device)


#: A point in the work of a device, or in the time of the host.
Moment = torch.Event | float


def moment(device: torch.device) -> Moment:
    """Return this point in the current stream of a device; now, in seconds, where all work is done (Rule 4)."""
    accelerator = accelerator_of(device.type)
    if accelerator is None or not accelerator.times_events:
        synchronize(device)
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # else that of the current device
    return event


def host_seconds(device: torch.device) -> float:
    """Return the time of the host, in seconds, to be compared with what moments of a device are apart."""
    accelerator = accelerator_of(device.type)
    return time.perf_counter() if accelerator is None else accelerator.host_seconds()


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds from one moment of a device to a later one; waits for that (Rule 4)."""
    if isinstance(start, torch.Event):
        assert isinstance(end, torch.Event)
        start.synchronize()  # it may be on another stream
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert not isinstance(end, torch.Event)
    return end - start


def has_passed(moment: Moment) -> bool:
    """Whether a device has come to a moment; does not wait for it."""
    return not isinstance(moment, torch.Event) or moment.query()


def generator_of(device: torch.device) -> torch.Generator | DeviceGenerator | None:
    """Return the default generator of a device, or what stands for it; None if it has no random numbers."""
    accelerator = accelerator_of(device.type)
    if accelerator is None:
        return None
    index = device.index if device.index is not None else accelerator.current_index()
    return None if index is None else accelerator.generator_at(index)


def used_generators() -> tuple[torch.Generator | DeviceGenerator, ...]:
    """Return the default generators of all devices of the accelerator that are in use, or what stands for them."""
    accelerator = current()
    return () if accelerator is None else accelerator.used_generators()


def autocast_types() -> tuple[str, ...]:
    """Return the types of devices that a program may have switched autocast on for."""
    own = torch_private.current_accelerator()
    if own is None or not torch.amp.is_autocast_available(own.type):
        return ("cpu",)
    return "cpu", own.type
