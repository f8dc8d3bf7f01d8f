"""The first step of a program, whose dropped tensors leave checksums: what it holds and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from on_device import memory_of
from oracle import num_checksums
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt.memory import LiveStorages

MIB = 2**20


def _peaks(make: Callable[[], Tensor]) -> list[float]:
    """Return the peaks of three steps of a new region, in MiB."""

    @actckpt.region()
    def forward() -> Tensor:
        return make()

    peaks = []
    for _ in range(3):
        with LiveStorages() as live:
            forward().backward()
        peaks.append(live.peak_bytes / MIB)
    print(peaks)
    return peaks


def _expanded() -> Tensor:
    matrix = torch.randn(512, 512, requires_grad=True)
    x = torch.randn(64, 8, 512, requires_grad=True)
    return torch.bmm(x, matrix.sin().expand(64, 512, 512)).sum()


def _windows() -> Tensor:
    x = torch.randn(100_000, requires_grad=True)
    return (x.sin().unfold(0, 64, 1) @ torch.randn(64, 1, requires_grad=True)).sum()


def _blocks() -> Tensor:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(128) for _ in range(4)))
    return blocks(torch.randn(4, 128, 128)).square().mean()


def _convolutions() -> Tensor:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.GELU())]
    return nn.Sequential(*layers)(torch.randn(4, 8, 64, 64)).square().mean()


PROGRAMS = {"expanded": _expanded, "windows": _windows, "transformer": _blocks, "convolutions": _convolutions}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_step_peaks_no_higher_than_the_next(name: str) -> None:
    first, *later = _peaks(PROGRAMS[name])
    assert first <= 1.05 * max(later) + 0.5


@pytest.mark.parametrize("name", ["expanded", "transformer"])
def test_nor_where_a_store_takes_the_originals(name: str, tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path)
    x = torch.randn(64, 64, requires_grad=True)
    with actckpt.offload(min_bytes=0):
        y = x.sin().sin()  # the store is in use
    before_bytes = actckpt.stats().offloaded_bytes
    first, *later = _peaks(lambda: PROGRAMS[name]())  # at a place of its own
    y.sum().backward()
    assert first <= 1.05 * max(later) + 4.5  # on the way to the store
    assert 0 < actckpt.stats().offloaded_bytes - before_bytes <= 32 * MIB


def test_what_is_kept_since_recomputing_it_holds_more_leaves_no_checksum() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    reasons: list[str] = []

    def program() -> None:
        with actckpt.region([torch.ops.aten.mm.default]) as region:
            result = ((x @ weight).sum(1) * x[0]).sum()
        reasons.extend(reason for row in region.report().rows for reason in row.not_replayed)
        torch.autograd.grad(result, (x, weight))

    assert num_checksums(program) == 0
    assert reasons.count("recomputing it would hold more bytes") == 1


def _written_behind_torch(large: Tensor) -> Tensor:
    small = large.sum(1)
    memory_of(small)[:] += 1
    return small


def _dropped_after_all(x: Tensor, weight: Tensor) -> Tensor:
    with actckpt.region([torch.ops.aten.mm.default]):
        large = x @ weight
        result = (_written_behind_torch(large) * x[0]).sum()
        return result + large.exp().log().sum()  # what it is made from is held anyway


def _overwritten(x: Tensor, weight: Tensor) -> Tensor:
    with actckpt.region([torch.ops.aten.mm.default]):
        small = _written_behind_torch(x @ weight)
        result = (small * x[0]).sum()
        small.data.add_(1)  # backward has what was saved
        return result


def _asked_for_inside(x: Tensor, weight: Tensor) -> Tensor:
    with actckpt.region([torch.ops.aten.mm.default]):
        result = (_written_behind_torch(x @ weight) * x[0]).sum()
        (gradient,) = torch.autograd.grad(result, x)
    return gradient.sum()


@pytest.mark.parametrize("program", [_dropped_after_all, _overwritten, _asked_for_inside])
def test_what_might_have_been_kept_is_audited_all_the_same(program: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with pytest.raises(actckpt.errors.AuditError):
        program(x, weight).backward()
