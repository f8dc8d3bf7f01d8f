"""Memory of the device that is freed, replaced or enlarged while it is copied out: NOTE [ Sources ]."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from offload_oracle import free_and_fill, free_memory
from sim import device
from sim.device.accelerator import offloading

import actckpt
from actckpt._core import devices
from actckpt.errors import OffloadError, SavedTensorChangedError

NUM_VALUES = 1 << 14


_FREED: dict[str, Callable[[torch.Tensor], Any]] = {
    "freed": free_memory,
    "freed and filled anew": free_and_fill,
    "freed by its old name": lambda h: h._typed_storage()._resize_(0),
    "made smaller": lambda h: h.untyped_storage().resize_(64),
}
#: C++ calls no wrapped method (NOTE [ Sources ]). The last two have a version counter of their own.
_ENLARGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda h: h.resize_(2 * NUM_VALUES),
    "out=": lambda h: torch.ones(2 * NUM_VALUES, out=h, device="sim"),
    "data.resize_": lambda h: h.data.resize_(2 * NUM_VALUES),
    "an alias": lambda h: torch.empty(0, device="sim").set_(h.untyped_storage()).resize_(2 * NUM_VALUES),
}


@pytest.fixture(params=[{}, {"host_limit": 1 << 16, "spill_dir": tempfile.gettempdir()}], ids=["pinned", "disk"])
def _offloading(request: pytest.FixtureRequest) -> Iterator[None]:
    with offloading(**request.param):
        yield


def _outcome(change: Callable[[torch.Tensor], Any]) -> str:
    """Change what is being copied out, let others have the memory, and say what backward then gives."""
    device.set_adversary(for_caller=True)
    x = torch.ones(NUM_VALUES, device="sim", requires_grad=True)
    h = torch.full((NUM_VALUES,), 2.0, device="sim")
    with actckpt.offload(min_bytes=0):
        y = x * h
    assert device.num_pending() > 0
    device.set_adversary(reluctance=1.0)
    change(h)
    others = [torch.full((NUM_VALUES,), 7.0, device="sim") for _ in range(3)]
    device.set_adversary(reluctance=0.99)
    try:
        (gradient,) = torch.autograd.grad(y.sum(), x)
    except SavedTensorChangedError:
        return "raises"
    finally:
        del y, others
    return "right" if torch.equal(gradient.cpu(), torch.full((NUM_VALUES,), 2.0)) else "wrong"


def _refused(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    def refused(h: torch.Tensor) -> None:
        nbytes = h.untyped_storage().nbytes()
        with pytest.raises(OffloadError, match=rf"{nbytes} bytes is being copied .*(?s:.*)Synchronize its device"):
            change(h)
        assert h.untyped_storage().nbytes() == nbytes

    return refused


def _synchronized(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    def change_later(h: torch.Tensor) -> None:
        devices.synchronize(h.device)
        change(h)

    return change_later


@pytest.mark.usefixtures("_offloading")
@pytest.mark.parametrize("how", _FREED)
@pytest.mark.parametrize("when", [_refused, _synchronized])
def test_memory_is_freed_only_once_its_copy_has_ended(how: str, when: Any) -> None:
    assert _outcome(when(_FREED[how])) == "right"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.usefixtures("_offloading")
@pytest.mark.parametrize("how", _ENLARGED)
def test_memory_that_cpp_replaces_under_a_copy_raises(how: str) -> None:
    assert _outcome(_ENLARGED[how]) == "raises"
    device.settle()
    faults = device.take_faults()
    assert faults and all("cuMemcpyDtoHAsync" in fault for fault in faults), "nobody uses what was copied"
