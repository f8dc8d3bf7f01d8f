"""What is asked of accelerators: found by type, on torch's public names, and nothing where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Log
from torch import Tensor

import actckpt
from actckpt import _C
from actckpt._core import devices, torch_private
from actckpt._core.devices import Accelerator, Cuda
from actckpt._offload import stores
from actckpt._offload.device import no_backend

#: A type that torch knows and a build for the CPU has no devices of.
KIND = "privateuseone"
CPU = torch.device("cpu")


class Module(SimpleNamespace):
    """The module of a device with two devices, as `torch.cuda` is one; draws random numbers by counting."""

    def __init__(self, **others: Any) -> None:
        self.drawn = [torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)]
        names = ("is_available", "device_count", "get_rng_state", "set_rng_state", "get_device_name")
        super().__init__(**{name: getattr(self, f"_{name}") for name in names} | others)

    def _is_available(self) -> bool:
        return True

    def _device_count(self) -> int:
        return 2

    def _get_device_name(self, device: torch.device) -> str:
        return f"number {device.index}"

    def _get_rng_state(self, index: int) -> Tensor:
        return self.drawn[index].clone()

    def _set_rng_state(self, state: Tensor, index: int) -> None:
        self.drawn[index].copy_(state)


@pytest.fixture(autouse=True)
def _accelerators_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_accelerators", {})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """torch has an accelerator, with a module."""
    found = Module()
    monkeypatch.setattr(torch, KIND, found, raising=False)
    monkeypatch.setattr(torch_private, "current_accelerator", lambda: torch.device(KIND))
    return found


@pytest.fixture
def there(module: Module) -> Accelerator:
    found = devices.current()
    assert found is not None
    return found


# Which accelerator it is.


def test_the_cpu_is_no_accelerator_and_has_nothing_to_wait_for() -> None:
    assert devices.accelerator_of("cpu") is None and devices.accelerator_of("meta") is None
    assert devices.counting(CPU) is None and devices.generator_of(CPU) is None
    devices.synchronize(CPU)


_KIND_OF_TORCH = torch_private.current_accelerator()


@pytest.mark.skipif(_KIND_OF_TORCH is not None, reason=f"torch is built for accelerators: {_KIND_OF_TORCH}")
def test_without_an_accelerator_there_is_none_for_any_type() -> None:
    assert devices.current() is None and devices.available() is None
    assert all(devices.accelerator_of(kind) is None for kind in ("cuda", "xpu", "mps", KIND))
    assert devices.current_index() is None and not devices.is_capturing()
    assert devices.autocast_types() == ("cpu",)


@pytest.mark.skipif(
    _KIND_OF_TORCH is None or torch.accelerator.is_available(),
    reason="torch is built for the CPU alone, or there is a device",
)
def test_an_accelerator_that_torch_is_built_for_has_no_device_here() -> None:
    assert _KIND_OF_TORCH is not None
    there = devices.current()
    assert there is not None and there is devices.accelerator_of(_KIND_OF_TORCH.type)
    assert devices.available() is None and devices.used_generators() == ()
    assert devices.current_index() is None and not devices.is_capturing()
    assert "cpu" in devices.autocast_types()


def test_torch_says_which_accelerator_there_is(there: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(there) is Accelerator and there.device_type == KIND and there.driver_library is None
    assert devices.accelerator_of(KIND) is there is devices.available()
    assert devices.accelerator_of("cuda") is None, "one kind per process"
    monkeypatch.setattr(torch_private, "current_accelerator", lambda: torch.device("cuda"))
    assert type(devices.current()) is Cuda


def test_a_registered_accelerator_stands_for_its_type_until_that_is_undone(there: Accelerator) -> None:
    first, second = Accelerator(KIND), Accelerator(KIND)
    undo_first = devices.register(first)
    undo_second = devices.register(second)
    assert devices.accelerator_of(KIND) is second is devices.current()
    undo_second()
    assert devices.accelerator_of(KIND) is first
    undo_first()
    assert devices.accelerator_of(KIND) is there
    devices.register(Accelerator("xpu"))()
    assert devices.accelerator_of("xpu") is None


def test_what_the_module_of_a_device_says(there: Accelerator, module: Module) -> None:
    assert there.device_count() == 2 and there.device_at(1) == torch.device(KIND, 1)
    assert there.name_of(torch.device(KIND, 1)) == "number 1"
    del module.get_device_name
    assert there.name_of(torch.device(KIND, 1)) == f"{KIND}:1"
    module.is_available = lambda: False
    assert devices.current() is there and devices.available() is None
    del module.set_rng_state
    assert there.generator_at(0) is None and there.generators() == [], "no random numbers to restore"


def test_only_nvidia_devices_have_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cuda().driver_library == devices.CUDA_LIBRARY or torch.version.hip is not None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Cuda().driver_library is None


def test_cuda_devices_are_integrated_if_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for attributes, expected in {(): False, (0,): False, (1, 0): False, (1,): True, (1, 1): True}.items():
        properties = [SimpleNamespace(is_integrated=attribute) for attribute in attributes]
        monkeypatch.setattr(torch.cuda, "device_count", properties.__len__)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        monkeypatch.setitem(devices._accelerators, "cuda", Cuda())
        assert devices.is_integrated("cuda") is expected
    assert not Accelerator(KIND).is_integrated and not devices.is_integrated("cpu")


@pytest.mark.parametrize(
    ("fraction", "reserved", "expected"), [(1.0, 2, (50, 80)), (0.5, 10, (30, 40)), (0.1, 9, (0, 8))]
)
def test_memory_that_a_process_may_not_have_is_not_free(
    fraction: float, reserved: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = {"mem_get_info": (50, 80), "get_per_process_memory_fraction": fraction, "memory_reserved": reserved}
    for name, value in tells.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    cuda, device = Cuda(), torch.device("cuda", 0)
    cuda.counts_memory = False  # type: ignore[misc]
    assert cuda.memory_info(device) == (50, 80)
    cuda.counts_memory = True  # type: ignore[misc]
    assert cuda.memory_info(device) == expected


# The current device and capture: tests/device/test_captured_steps.py has steps.


def test_no_device_is_current_until_one_was_used(
    there: Accelerator, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert devices.current_index() == 1, "a module need not tell"
    module.is_initialized = lambda: False
    module.is_current_stream_capturing = lambda: pytest.fail("would start the device")
    assert devices.current_index() is None and not devices.is_capturing()
    module.is_initialized = lambda: True
    assert devices.current_index() == 1
    module.is_current_stream_capturing = lambda: True
    assert devices.is_capturing()


# Random numbers.


def test_the_generators_that_a_module_shows_are_used(there: Accelerator, module: Module) -> None:
    module.default_generators = ()
    assert devices.generator_of(torch.device(KIND, 1)) is None, "no device was used"
    module.default_generators = torch.Generator(), torch.Generator()
    assert devices.generator_of(torch.device(KIND, 1)) is module.default_generators[1]


def test_a_cuda_device_is_in_use_when_it_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, with_context = Cuda(), {0}
    monkeypatch.setattr(cuda, "current_index", lambda: 0)
    monkeypatch.setattr(cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda, "generator_at", str)
    monkeypatch.setattr(torch_private, "cuda_has_context", with_context.__contains__)
    assert cuda.used_generators() == ("0",)
    with_context.add(2)
    assert cuda.used_generators() == cuda.used_generators() == ("0", "2")
    with_context.add(1)
    assert cuda.used_generators() == ("0", "2", "1")
    monkeypatch.setattr(torch_private, "cuda_has_context", None)
    assert all(map(Cuda().is_used, range(3))), "nobody tells"


# Autocast.


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("policy", [None, "matmuls"])
def test_autocast_of_the_accelerator_is_restored_in_reruns_and_off_in_replay(
    monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    monkeypatch.setattr(torch_private, "current_accelerator", lambda: torch.device("xpu"))
    seen = Log()

    def function(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("xpu"), torch.get_autocast_dtype("xpu")))
        return x.sin().sin()

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("xpu", dtype=torch.bfloat16):
        y = actckpt.checkpoint(function, x, policy=policy)
    assert not torch.is_autocast_enabled("xpu")
    y.sum().backward()
    assert seen == [(True, torch.bfloat16)] * (2 if policy is None else 1)
    assert x.grad is not None and not torch.is_autocast_enabled("xpu")


def test_an_accelerator_that_has_no_autocast_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.autocast raises for one whose module lacks `get_amp_supported_dtype`, also to switch it off."""
    monkeypatch.setattr(torch_private, "current_accelerator", lambda: torch.device(KIND))
    with pytest.raises(AssertionError):
        torch.autocast(KIND, enabled=False)
    for policy in (None, "matmuls"):
        x = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = actckpt.checkpoint(lambda x: (x @ x).sin().sin(), x, policy=policy)
        y.sum().backward()
        assert y.dtype is torch.bfloat16 and x.grad is not None


# Streams.


def test_streams_are_found_again_by_their_handles(there: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {index: SimpleNamespace(native_handle=7) for index in (0, 1)}
    monkeypatch.setattr(torch.accelerator, "current_stream", made.__getitem__)
    for index in made:
        assert there.stream_handle(index) == 7
        assert there.stream_at(7, index) is made[index]
    with pytest.raises(KeyError):
        there.stream_at(8, 0)


# Memory.


def test_an_allocator_that_does_not_count_is_noticed(there: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise RuntimeError("Allocator for privateuseone is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "memory_allocated", refuse)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse, raising=False)
    device = torch.device(KIND, 0)
    assert not there.counts_memory and devices.counting(device) is None and there.unused_bytes(device) == 0
    assert there.memory_info(device) is None
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda *args: 5)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda *args: 7)
    other = Accelerator(KIND)
    assert other.counts_memory and other.unused_bytes(device) == 2


def test_free_memory_is_asked_of_the_module_where_torch_is_older(
    there: Accelerator, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    assert there.memory_info(torch.device(KIND, 0)) is None
    module.mem_get_info = lambda device: (3, 8)
    assert there.memory_info(torch.device(KIND, 0)) == (3, 8)


# What the engine has no backend for.


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (None, r"'privateuseone' devices: it has no backend.*policy='recompute'"),
        ("libno.so.1", r"no driver libno\.so\.1"),
    ],
)
def test_host_memory_is_refused_in_one_line_where_the_engine_has_no_backend(
    there: Accelerator, library: str | None, why: str
) -> None:
    there.driver_library = library
    for ask in (lambda: actckpt.offload("host"), lambda: stores.store_for(KIND), lambda: stores.store_for(KIND)):
        with pytest.raises((ValueError, _C.OffloadError), match=why) as told:
            ask()
        assert "\n" not in str(told.value)
    assert not stores.is_ready(KIND) and stores.why_none(KIND) == no_backend(KIND) != ""
    assert stores.why_none("cpu") == stores.why_none("meta") == ""


def test_a_backend_is_all_that_offload_asks_for(there: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    there.driver_library = "libsome.so.1"
    monkeypatch.setattr(_C, "why_no_driver", lambda library: "")
    actckpt.offload("host")
    assert no_backend(KIND) == ""
