"""The garbage collector sees what objects of the extension hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import actckpt
from actckpt import _C
from actckpt._core import torch_private

HAVE_GC = 1 << 14

#: Types that the collector does not see into, and why that leaves nothing behind.
UNSEEN = {
    **dict.fromkeys(
        ["Value", "Step", "KnownStorage", "Window", "Handle", "Entry", "Slot", "Moved", "Unmoved"],
        "made for every saved tensor: only autograd's graph holds it, which the collector does not see into either",
    ),
    "RecomputedValues": "holds nothing once its rerun is over",
    "Calls": "holds the calls of modules that are running",
    "Meter": "holds weak references",
    "Paused": "lives as long as a block",
    "Swap": "lives as long as a block",
    "OffloadSession": "holds a store, a meter and numbers",
    **dict.fromkeys(
        ["Bytes", "DeviceTicket", "EngineStore", "EngineTicket", "NativeStore", "StoreTicket"],
        "holds memory",
    ),
    "TorchStreams": "holds an accelerator, of which there is one for each kind of device, and its streams",
    "DeviceEngine": "holds memory, and a function that tells the allocator of its uses",
    **dict.fromkeys(
        ["DeviceStats", "PoolStats", "SpillStats", "Pool", "PoolBlock", "SpillBlock", "SpillFile"],
        "holds memory, files and numbers",
    ),
    **dict.fromkeys(["Kept", "LastMoved", "Timing"], "holds numbers"),
}


class Probe:
    """Stands for an object of the user: what it holds in `made` holds it in turn."""

    made: Any = None

    def pack(self, tensor: torch.Tensor) -> Any:
        return self

    def unpack(self, packed: Any) -> Any: ...

    def get_state(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hooks = torch_private.outer_hooks()
        assert hooks is not None
        self.made = hooks[0].__self__
        assert type(self.made) is _C.Frame
        return x.sin().exp()


class _Module(Probe, torch.nn.Module):
    __call__ = torch.nn.Module.__call__
    forward = Probe.__call__


def _frame(function: Probe) -> Any:
    actckpt.checkpoint(function, torch.ones(3, requires_grad=True))
    return function.made


MADE: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "Frame": (Probe, _frame),
    "Frame of a module": (_Module, _frame),
    "HeldTensor": (Probe, lambda probe: _C.hold(torch.ones(1), probe.pack, probe.unpack)),
    "GeneratorStates": (Probe, lambda probe: _C.capture_generators((probe,))),
    "Parameters": (_Module, lambda module: _C.Parameters(module)),
}


def _is_freed(probes: list[Any]) -> bool:
    """Whether the only object of a list is freed once the list lets go of it."""
    reference = weakref.ref(probes[0])
    probes.clear()
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("name", MADE)
def test_a_cycle_is_freed(name: str) -> None:
    make, hold = MADE[name]
    probes = [make()]
    probes[0].made = hold(probes[0])
    assert isinstance(probes[0].made, vars(_C)[name.split()[0]])
    assert _is_freed(probes)


_FIELDS = [name for name, member in vars(_C.TapeCore).items() if type(member).__name__ == "member_descriptor"]


@pytest.mark.parametrize("field", _FIELDS)
def test_a_cycle_through_each_field_of_a_tape_is_freed(field: str) -> None:
    probes = [Probe()]
    probes[0].made = tape = _C.TapeCore()
    if type(getattr(tape, field)) in (int, bool):
        return
    setattr(tape, field, probes[0])
    del tape
    assert _is_freed(probes)


def test_what_a_frame_shares_is_not_taken_for_garbage() -> None:
    module = _Module()
    parameters = _frame(module).parameters
    module.made = None
    gc.collect()
    assert parameters.check() is False
    module.extra = parameters
    for _ in range(3):
        gc.collect()
    assert parameters.check() is False


def test_each_type_is_seen_by_the_collector_or_says_why_not() -> None:
    types = {name: found for name, found in vars(_C).items() if isinstance(found, type)}
    types = {name: found for name, found in types.items() if not issubclass(found, BaseException)}
    seen = {name for name, found in types.items() if found.__flags__ & HAVE_GC}
    assert seen == types.keys() - UNSEEN.keys()
    assert seen == {name.split()[0] for name in MADE} | {"TapeCore"}


def test_a_storage_whose_size_cannot_be_read_is_counted_once_it_can() -> None:
    class Storage:
        nbytes = Mock(side_effect=[RuntimeError("no size"), 8])

    meter, storage = _C.Meter(), Storage()
    with pytest.raises(RuntimeError, match="no size"):
        meter.note(storage)
    meter.note(storage)
    assert meter.live_bytes == 8
    del storage
    assert meter.live_bytes == 0
