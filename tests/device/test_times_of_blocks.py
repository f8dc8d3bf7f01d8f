"""What a block takes on a device in training: what the device takes, or the host where that is longer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sim import device as sim
from sim.device.accelerator import Simulated
from torch import Tensor, nn

import actckpt
from actckpt._budget import timing
from actckpt._budget.profiled_block import OTHER
from actckpt._core import devices
from actckpt._offload import session

_DEVICE = torch.device("sim", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of the host that programs advance, as `seconds`."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(Simulated, "host_seconds", lambda _: clock.seconds)
    return clock


class _Double(torch.autograd.Function):
    """Takes the host and the device so many seconds in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, host: SimpleNamespace, host_s: float, device_s: float) -> Tensor:
        ctx.host, ctx.host_s, ctx.device_s = host, host_s, device_s
        host.seconds += host_s
        sim.advance(device_s)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        ctx.host.seconds += 2 * ctx.host_s
        sim.advance(2 * ctx.device_s)
        return 2 * grad, None, None, None


@pytest.mark.parametrize(("host_s", "device_s"), [(3.0, 1.0), (1.0, 3.0)])
def test_the_slower_of_host_and_device_counts(host: SimpleNamespace, host_s: float, device_s: float) -> None:
    assert isinstance(devices.accelerator_of("sim"), Simulated)

    @contextlib.contextmanager
    def runs() -> Iterator[timing.Run]:
        x = torch.ones(4, device=_DEVICE, requires_grad=True)
        yield timing.Run(_Double.apply, (x, host, host_s, device_s), {}, [x])

    found = timing.fastest(runs, recorded=runs, rerun=None, device=_DEVICE)
    assert [found.forward_s, found.recorded_s] == pytest.approx([3.0, 3.0])
    assert [found.backward_s, found.replaying_s] == pytest.approx([6.0, 6.0])


@pytest.mark.parametrize(
    ("host_s", "device_s", "expected_s"),
    [
        # A value takes the host 0.25 s in forward and as long in backward, and the device hides nothing.
        (3.0, 1.0, 0.5),
        # It hides 2 s and 4 s, which is what eight values take.
        (1.0, 3.0, 0.0),
        # The device hides half of their host time in forward, and all of it in backward.
        (1.0, 2.0, 0.125),
    ],
)
def test_what_the_device_does_not_hide_is_shared_out_to_what_is_offloaded(
    host: SimpleNamespace, host_s: float, device_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def runs() -> Iterator[timing.Run]:
        x = torch.ones(4, device=_DEVICE, requires_grad=True)
        yield timing.Run(_Double.apply, (x, host, host_s, device_s), {}, [x])

    monkeypatch.setattr(timing, "_PER_OFFLOADED_S", 0.25)
    found = timing.fastest(runs, recorded=runs, rerun=None, device=_DEVICE, num_offloadable=8)
    assert found.offload_s == pytest.approx(expected_s)


def test_moments_are_those_of_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("sim", 1)
    with sim.timed(kernel_bytes_per_s=1e6):
        x = torch.ones(1 << 18, device=other)
        start = devices.moment(other)
        x * 2
        end = devices.moment(other)
    assert torch.accelerator.current_device_index() == 0
    assert isinstance(start, torch.Event) and devices.seconds_between(start, end) > 0.5


def test_only_what_may_be_offloaded_takes_the_host_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "DEFAULT_MIN_BYTES", 0)
    monkeypatch.setattr(timing, "_PER_OFFLOADED_S", 1.0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4)).to(_DEVICE)
    x = torch.randn(64, 16, device=_DEVICE)
    actckpt.apply(model, blocks=["0", "1", "2"], budget=1 << 30, race=False)
    for _ in range(3):  # the second one is the first in which gradients accumulate
        model(x).square().mean().backward()
    plan = actckpt.report(model).plan
    assert plan is not None
    found = [value for block in plan.costs.blocks for value in block.values]
    assert {value.offload_s for value in found if value.name == OTHER} == {0.0}
    moved = [value.offload_s for value in found if value.offloadable]
    assert len(moved) > 4 and moved == pytest.approx([2.0] * len(moved), rel=0.1)
