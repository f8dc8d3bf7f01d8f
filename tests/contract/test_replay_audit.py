"""Rule 6: kernels that write behind the dispatcher's back never give a wrong gradient, from the first step on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor

import actckpt


@pytest.fixture(autouse=True)
def _first() -> Iterator[None]:
    before = actckpt.configure().audit
    actckpt.configure(audit="first")
    yield
    actckpt.configure(audit=before, opaque=())


def _write(target: Tensor, source: Tensor) -> None:
    """Copy bytes as a kernel would that torch knows nothing of."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


class IntoFreshMemory(torch.autograd.Function):
    """Its result comes from a raw kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _write(out, torch.from_numpy(x.detach().numpy() * 3))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class IntoRecordedValue(torch.autograd.Function):
    """A raw kernel overwrites what a recorded operator made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        _write(out, torch.from_numpy(x.detach().numpy() * 5))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def _step(function: Any, x: Tensor, region: Any) -> Tensor:
    with region:
        y = (function.apply(x.sin()) * x).exp()
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("function", [IntoFreshMemory, IntoRecordedValue])
@pytest.mark.filterwarnings("ignore:.*came back from replay with other bytes:UserWarning")
@pytest.mark.parametrize("has_store", [False, True])
def test_rule_6_a_raw_write_never_gives_a_wrong_gradient(function: Any, has_store: bool) -> None:
    from contextlib import nullcontext

    x = torch.randn(3, 5, requires_grad=True)
    expected = _step(function, x, nullcontext())
    if has_store:
        with actckpt.offload(min_bytes=0):
            (torch.ones(3, requires_grad=True) ** 2).sum().backward()
    refused = 0
    for _ in range(5):
        try:
            found = _step(function, x, actckpt.region())
        except actckpt.AuditError as error:
            assert "configure(opaque=" in str(error)
            refused += 1
        else:
            assert_equal(found, expected)
    assert refused == 0 if function is IntoFreshMemory else refused <= 1


def test_rule_6_the_line_that_the_error_gives_helps() -> None:
    x = torch.randn(4, 7, requires_grad=True)
    actckpt.configure(opaque=["aten.mul.Tensor"])
    from contextlib import nullcontext

    assert_equal(_step(IntoRecordedValue, x, actckpt.region()), _step(IntoRecordedValue, x, nullcontext()))


def _num_checksums(shape: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many checksums one call of a region left; all calls have one site."""
    from actckpt.runtime.replay import audit

    taken: list[Tensor] = []
    right = audit.checksum
    monkeypatch.setattr(audit, "checksum", lambda tensor: taken.append(tensor) or right(tensor))
    x = torch.randn(shape, requires_grad=True)
    with actckpt.region():
        y = x.sin().exp()
    left = len(taken)
    y.sum().backward()
    monkeypatch.undo()
    return left


def test_rule_6_more_than_64_structures_per_site_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    actckpt.configure(audit="first")
    left = [_num_checksums(shape, monkeypatch) for shape in range(1, 66)]
    assert min(left) > 0  # each of 65 shapes for the first time
    sampled = [_num_checksums(shape, monkeypatch) for shape in range(66, 66 + 64)]
    assert sum(count > 0 for count in sampled) == 64 // 16
    actckpt.configure(audit="always")
    assert min(_num_checksums(shape, monkeypatch) for shape in range(200, 220)) > 0
