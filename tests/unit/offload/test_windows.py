"""The limit of in-flight bytes of a store: the lowest limit of its owners, such as blocks under a plan."""

from __future__ import annotations

import gc

import pytest
import torch
from internals.stores import offload_from, store_of_kind
from torch import Tensor, nn

import actckpt
from actckpt._offload import stores
from actckpt._offload.reading import max_inflight


class _Owner:
    """Stands for blocks that run under a plan."""


def _most_in_flight(model: nn.Module, x: Tensor) -> int:
    actckpt.reset_stats()
    with actckpt.offload(min_bytes=0):
        loss = model(x).square().mean()
    loss.backward()
    return actckpt.stats().peak_inflight_bytes


def test_the_least_of_what_owners_allow_is_the_window() -> None:
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))), torch.randn(512, 256)
    nbytes = x.nbytes
    first, other = _Owner(), _Owner()
    with store_of_kind("disk", window_bytes=16 * nbytes):
        stores.limit_windows(first, 4 * nbytes)
        stores.limit_windows(other, 2 * nbytes)
        assert (stores.window_bytes(), max_inflight()) == (2 * nbytes, 2 * nbytes)
        assert 0 < _most_in_flight(model, x) <= 2 * nbytes
        stores.limit_windows(other, None)
        assert (stores.window_bytes(), max_inflight()) == (4 * nbytes, 4 * nbytes)
        actckpt.configure(max_inflight=nbytes)
        assert max_inflight() == nbytes  # less than the owner allows
        stores.limit_windows(other, 1)
        assert max_inflight() == 1
        del first, other
        gc.collect()
        assert (stores.window_bytes(), max_inflight()) == (16 * nbytes, nbytes)


def _offloads() -> None:
    with actckpt.offload(min_bytes=0):
        y = (torch.randn(64, 64, requires_grad=True) * 1).sin().sum()
    y.backward()


def test_a_store_made_later_has_the_limit_of_owners() -> None:
    actckpt.configure(max_inflight="64MiB")  # until the fixture of all tests puts it back
    _offloads()
    expected = stores.window_bytes()  # less where a model of another test lives on, whose plan offloads
    owner = _Owner()
    stores.limit_windows(owner, 3 << 20)
    for limit in ("32MiB", "64MiB"):  # the store is made again when it is used next
        actckpt.configure(max_inflight=limit)
    _offloads()
    assert stores.window_bytes() == 3 << 20
    del owner
    gc.collect()
    assert stores.window_bytes() == expected


def test_windows_of_a_plan_end_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_from(monkeypatch, 4 << 10)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)))
    x = torch.randn(256, 64)
    actckpt.apply(model, activation_budget="60%", pins={"0::aten.addmm.default#0.0": "offload"})
    for _ in range(3):
        model(x).square().mean().backward()
        assert stores.limited(1 << 60) == 1 << 60
    loss = model(x).square().mean()
    assert stores.limited(1 << 60) < 1 << 20
    actckpt.remove(model)
    loss.backward()
    assert stores.limited(1 << 60) == 1 << 60, "hooks of its graph limit nothing afterwards"
