"""The store of device tensors over the simulated device: right as it is, and caught as soon as anything is left out.

The engine, its CUDA backend, the store and the accelerator are the package's. What is left out is generated: each rule
of the engine's protocol, and each call of an accelerator or a tensor that orders streams.
"""

from __future__ import annotations

import gc
import inspect
import re
import tempfile
import typing
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sim
import store_programs
import torch
from sim import device
from sim.device.accelerator import Simulated, offloading
from torch import nn

import actckpt
from actckpt import _C
from actckpt._core import devices
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore
from actckpt.errors import ActckptError

#: What only orders the memory of the tier below pinned memory, which is none of a device: tests of the engine see it.
TIER_RULES = {"place_outlives_dropped_haul"}
NUM_PROGRAMS = 200


def test_random_programs_are_right(tmp_path: Path) -> None:
    for seed in range(NUM_PROGRAMS):
        with store_programs.store(seed, str(tmp_path)) as store:
            assert store_programs.run_program(seed, store) == [], seed


@pytest.mark.parametrize("rule", sorted(set(sim.rules()) - TIER_RULES))
def test_leaving_out_a_rule_is_caught(rule: str, tmp_path: Path) -> None:
    def is_caught(seed: int) -> bool:
        with store_programs.store(seed, str(tmp_path), rule) as store:
            return bool(store_programs.run_program(seed, store))

    assert any(is_caught(seed) for seed in range(NUM_PROGRAMS))


def _ordering_calls() -> set[str]:
    """Return the methods of `Accelerator` that say in which order devices work."""
    section = inspect.getsource(devices.Accelerator).split("# Streams\n")[1].split("\n    # ")[0]
    return set(re.findall(r"def (\w+)\(", section))


#: What is asked of an accelerator and of tensors, and in which call of the store. The stream of a handle is asked for
#: once.
CALLS = {
    "stream_handle in put",
    "stream_handle in saved_again",
    "stream_handle in fetch",
    "stream_handle in prefetch",
    "stream_at",
    "on_stream in prefetch",
    "record_stream in put",
    "record_stream in saved_again",
    "record_stream in fetch",
}
#: What others than the store call: measurements synchronize, and tests/unit/core/test_devices.py leaves out the other.
_OF_OTHERS = {"synchronize", "is_capturing"}


class _Asked:
    """Which calls that order streams were made; leaves out one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left_out: str = "") -> None:
        self.calls: set[str] = set()
        self._left_out = left_out
        record = torch.Tensor.record_stream
        monkeypatch.setattr(torch.Tensor, "record_stream", self._instead("record_stream", record, lambda *_: None))

    def accelerator(self) -> Simulated:
        asked = Simulated()
        for name in _ordering_calls():
            method = getattr(asked, name)
            result = typing.get_type_hints(getattr(devices.Accelerator, name))["return"]
            nothing = {int: lambda *_: 0, torch.Stream: lambda _, index: torch.sim.default_stream(index)}
            setattr(asked, name, self._instead(name, method, nothing.get(result, lambda *_: nullcontext())))
        return asked

    def _instead(self, name: str, method: Callable[..., Any], nothing: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            is_once = name == "stream_at" or not store_programs.running
            call = name if is_once else f"{name} in {store_programs.running}"
            self.calls.add(call)
            return (nothing if call == self._left_out else method)(*given)

        return ask


def test_every_ordering_call_is_left_out_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked(monkeypatch)
    for seed in range(20):
        with store_programs.store(seed, str(tmp_path), make_accelerator=asked.accelerator) as store:
            assert store_programs.run_program(seed, store) == [], seed
    assert {call.partition(" ")[0] for call in CALLS} | _OF_OTHERS == _ordering_calls() | {"record_stream"}
    assert asked.calls >= CALLS


@pytest.mark.parametrize("call", sorted(CALLS))
def test_leaving_out_a_call_that_orders_streams_is_caught(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _Asked(monkeypatch, call)

    def is_caught(seed: int) -> bool:
        with store_programs.store(seed, str(tmp_path), make_accelerator=asked.accelerator) as store:
            return bool(store_programs.run_program(seed, store))

    assert any(is_caught(seed) for seed in range(NUM_PROGRAMS))


def _copied_out(nbytes: int = 4000) -> tuple[DeviceStore, torch.Stream]:
    """Have a tensor on its way out that takes a second; return the store, and a stream that did nothing yet."""
    store = stores.store_for("sim")
    tensor = torch.ones(nbytes // 4, device="sim")
    store.put(_C.Bytes(tensor.untyped_storage(), 0), nbytes)
    return store, torch.Stream(device="sim")


def test_the_stream_that_asks_for_room_waits() -> None:
    with offloading(), device.timed(link_bytes_per_s=4000.0, kernel_bytes_per_s=1e12):
        store, side = _copied_out()
        begin, end, other = (torch.Event("sim", enable_timing=True) for _ in range(3))
        begin.record(side)
        store.limit_window(0)
        with side:
            store.make_room(torch.device("sim", 0))
        end.record(side)
        other.record(torch.sim.default_stream())
        torch.accelerator.synchronize()
        assert begin.elapsed_time(end) == pytest.approx(1000.0)
        assert begin.elapsed_time(other) < 1.0
        assert store.engine.stats().inflight_bytes == 0


def _gradients(model: nn.Module, num_steps: int = 2, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    values = torch.randn(4, 16, 32, device="sim")
    model.zero_grad()
    for _ in range(num_steps):
        with actckpt.offload(**options) if options else nullcontext():
            loss = model(values).pow(2).mean()
        loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def model() -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(*blocks).to("sim")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "settings",
    [{}, {"host_limit": 1 << 20, "spill_dir": tempfile.gettempdir(), "max_inflight": 1 << 16}],
    ids=["pinned", "disk"],
)
def test_offloading_gives_the_gradients_of_plain_training(
    model: nn.Module, seed: int, settings: dict[str, Any]
) -> None:
    expected = _gradients(model)
    device.set_adversary(seed, 0.1 * seed, 0.9 - 0.1 * seed)
    with offloading(**settings), device.judging_frees():
        before = actckpt.stats().offloaded_bytes
        found = _gradients(model, min_bytes=0)
        assert actckpt.stats().offloaded_bytes > before
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    ("is_set_up", "calls"),
    [*((True, calls) for calls in (0, 1, 5, 20, 50, 100, 200, 400, 800)), *((False, calls) for calls in range(12))],
)
def test_a_device_that_is_lost_gives_right_gradients_or_one_error(
    model: nn.Module, is_set_up: bool, calls: int
) -> None:
    """In the middle of a step, or while the engine is made."""
    expected = _gradients(model)
    with offloading():
        if is_set_up:
            _gradients(model, 1, min_bytes=0)
        try:
            with device.failing_driver(calls):
                found = _gradients(model, min_bytes=0)
        except ActckptError as error:
            assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(error)
            assert is_set_up or calls > 0 or device.library_path in str(error), "the driver itself does not start"
        else:
            assert (is_set_up or calls > 0) and all(map(torch.equal, expected, found))
    gc.collect()  # the engine, which knows nothing of its copies any more
    device.take_faults()


def test_a_store_that_goes_with_copies_under_way_leaves_nothing_behind() -> None:
    values = torch.ones(1 << 16, device="sim", requires_grad=True)
    before = torch.sim.memory_allocated()
    device.set_adversary(for_caller=True)
    with offloading(), actckpt.offload(min_bytes=0):
        (values * 1.5).sin().exp()
        assert device.num_pending() > 0
    gc.collect()
    assert torch.sim.memory_allocated() == before and device.num_registered_bytes() == 0


def test_what_the_driver_will_not_pin_stays_on_the_device(model: nn.Module) -> None:
    expected = _gradients(model)
    with device.refusing_pins(), offloading():
        assert all(map(torch.equal, expected, _gradients(model, min_bytes=0)))
