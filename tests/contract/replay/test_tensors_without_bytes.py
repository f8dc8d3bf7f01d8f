"""Regions over fake and meta tensors, which have shapes and no bytes: they hold what they would hold of real ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import actckpt
from actckpt.memory import LiveStorages
from actckpt.policies import PerOp

_aten = torch.ops.aten

POLICIES: dict[str, Any] = {
    "keep": "keep",
    "recompute": "recompute",
    "list": [_aten.addmm.default],
    "PerOp": PerOp({_aten.addmm.default: "keep", _aten.native_dropout.default: "keep"}, default="recompute"),
    "callable": lambda info: "recompute" if info.nbytes > 4096 else "keep",
}
FAKE: dict[str, Callable[[], Any]] = {"cpu": FakeTensorMode, "meta": contextlib.nullcontext}


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64, device=device),
        nn.GELU(),
        nn.LayerNorm(64, device=device),
        nn.Dropout(0.1),
        nn.Linear(64, 64, device=device),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(64, device=device),
        nn.Linear(64, 32, device=device),
    )


def _step(policy: Any, device: str, counted: str | None) -> tuple[list[Any], int, int, list[Tensor]]:
    model, x = _model(device), torch.ones(16, 32, device=device, requires_grad=True)
    with LiveStorages(parameters=[*model.parameters(), x], device=counted) as live:
        with actckpt.region(policy) as region:
            y = model(x).sin()
        held_bytes = live.live_bytes
        y.sum().backward()
    rows = [(row.operator, row.kept_bytes, row.recomputed_bytes, row.offloaded_bytes) for row in region.report().rows]
    return rows, held_bytes, live.peak_bytes, [leaf.grad for leaf in (*model.parameters(), x)]  # type: ignore[misc]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", FAKE)
def test_a_region_over_tensors_without_bytes_holds_what_it_holds_of_real_ones(policy: str, device: str) -> None:
    actckpt.configure(audit="off")
    real = _step(POLICIES[policy], "cpu", None)
    with FAKE[device]():
        for _ in range(2):
            found = _step(POLICIES[policy], device, "meta")
    assert found[0] == real[0]
    assert found[1] == real[1] > 0
    assert found[2] == pytest.approx(real[2], rel=0.01)
    assert [gradient.shape for gradient in found[3]] == [gradient.shape for gradient in real[3]]
    assert all(gradient.is_meta or isinstance(gradient, FakeTensor) for gradient in found[3])


@pytest.mark.parametrize("audit", ["first", "always"])
@pytest.mark.parametrize("policy", ["offload", PerOp({_aten.addmm.default: "offload"}, default="recompute")], ids=str)
@pytest.mark.parametrize("device", FAKE)
def test_what_has_no_bytes_is_neither_moved_nor_audited(device: str, policy: Any, audit: str) -> None:
    actckpt.configure(audit=audit)
    actckpt.reset_stats()
    with FAKE[device]():
        _, _, _, gradients = _step(policy, device, "meta")
    assert all(gradient.is_meta or isinstance(gradient, FakeTensor) for gradient in gradients)
    assert actckpt.stats().offloaded_bytes == 0


@pytest.mark.parametrize("device", FAKE)
def test_a_rerun_over_tensors_without_bytes_makes_gradients(device: str) -> None:
    with FAKE[device]():
        model, x = _model(device), torch.ones(16, 32, device=device, requires_grad=True)
        for offload_inputs in (False, True):
            actckpt.checkpoint(model, x, offload_inputs=offload_inputs).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_fake_tensors_of_real_ones_go_through_a_region() -> None:
    mode = FakeTensorMode()
    real = nn.Linear(4, 3)
    fakes = {name: mode.from_tensor(parameter) for name, parameter in real.named_parameters()}
    x = mode.from_tensor(torch.ones(2, 4, requires_grad=True))
    for is_inside in (True, False):
        with mode if is_inside else contextlib.nullcontext(), actckpt.region():
            y = torch.func.functional_call(real, fakes, (x.sin(),)).exp()
        y.sum().backward()
        assert isinstance(x.grad, FakeTensor) and x.grad.shape == (2, 4)


def test_real_tensors_come_back_right_beside_fake_ones() -> None:
    x = torch.linspace(0, 1, 5, requires_grad=True)
    with actckpt.region():
        y = x.sin()
        with FakeTensorMode():
            fake = torch.ones(3, requires_grad=True)
            (fake.exp() * 2).sum().backward()
        z = y.exp()
    z.sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def _seconds(policy: Any) -> float:
    x = torch.ones(8, 8, device="meta", requires_grad=True)
    start_s = time.process_time()
    with contextlib.nullcontext() if policy is None else actckpt.region(policy):
        y = x
        for _ in range(10):
            y = (y * 2).exp()
    y.sum().backward()
    return time.process_time() - start_s


def test_a_region_over_meta_tensors_takes_a_few_times_as_long_as_plain() -> None:
    _seconds(None), _seconds("recompute")
    times = [(_seconds("recompute"), _seconds(None)) for _ in range(9)]
    ours, plain = (median(column) for column in zip(*times, strict=True))
    assert ours < 5 * plain  # asking DLPack about a meta tensor made it 200 times
