"""`PREFER_OFFLOAD` moves what the store has room for at once, and never makes forward wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from internals.stores import PythonStore, faults, faulty_store, flush, store_on_disk, using
from oracle import assert_equal, leaf
from torch import Tensor

import actckpt
from actckpt import Action

_MM = torch.ops.aten.mm.default
_KIB = 1024


class _ScriptedStore(PythonStore):
    """A store that may find no room, for what prefers to move."""

    has_room = True

    def put(self, source: Any, nbytes: int, *, must: bool = True) -> Any | None:
        if not (must or self.has_room):
            return None
        return super().put(source, nbytes, must=True)  # a device whose copies are late has none at once


@contextmanager
def _scripted(folder: Path) -> Iterator[_ScriptedStore]:
    store = _ScriptedStore(store_on_disk(str(folder)))
    with using(store):
        yield store


def _program(x: Tensor, w: Tensor) -> Tensor:
    """Saves matmuls of 16, 32 and 64 KiB, as inputs of `sin`."""
    a = torch.mm(x, w).sin()
    b = torch.mm(torch.cat([a, a]), w).sin()
    return torch.mm(torch.cat([b, b]), w).sin().sum()


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return leaf(64, 64), leaf(64, 64)


_per_op = actckpt.policies.PerOp({_MM: Action.PREFER_OFFLOAD})
_POLICIES: dict[str, Any] = {
    "name": "prefer_offload",
    "action": Action.PREFER_OFFLOAD,
    "operators": _per_op,
    "value function": lambda info: Action.PREFER_OFFLOAD if info.op is _MM else Action.RECOMPUTE,
}


def _step(policy: Any) -> tuple[tuple[Tensor, ...], actckpt.regions.Report]:
    """Return the gradients of one step, and the report of its region."""
    x, w = _inputs()
    with actckpt.region(policy) as region:
        loss = _program(x, w)
    flush()
    return torch.autograd.grad(loss, (x, w)), region.report()


def _plain() -> tuple[Tensor, ...]:
    x, w = _inputs()
    return torch.autograd.grad(_program(x, w), (x, w))


def _moved(report: actckpt.regions.Report) -> int:
    """Return how many bytes of matmuls were moved."""
    return sum(row.offloaded_bytes for row in report.rows if row.operator == "aten.mm.default")


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES.keys())
def test_every_form_of_policy_offloads_where_there_is_room(policy: Any, tmp_path: Path) -> None:
    with _scripted(tmp_path):
        for _ in range(4):
            grads, report = _step(policy)
            assert_equal(grads, _plain())
            assert _moved(report) == (16 + 32 + 64) * _KIB


@pytest.mark.parametrize("action", [Action.PREFER_OFFLOAD, Action.OFFLOAD])
def test_what_finds_no_room_at_once_stays_if_it_only_prefers_to_move(action: Action, tmp_path: Path) -> None:
    with _scripted(tmp_path) as store:
        store.has_room = False
        grads, report = _step(actckpt.policies.PerOp({_MM: action}))
    assert_equal(grads, _plain())
    if action is Action.OFFLOAD:
        assert _moved(report) == (16 + 32 + 64) * _KIB
        return
    assert _moved(report) == 0
    (row,) = [row for row in report.rows if row.operator == "aten.mm.default"]
    assert row.kept_bytes == (16 + 32 + 64) * _KIB
    assert row.not_replayed == {"no store takes it or had room for it at once": 3}


def test_forward_does_not_wait_for_a_disk_that_is_behind(tmp_path: Path) -> None:
    with faulty_store(tmp_path, window_bytes=20 * _KIB, num_workers=1) as io:
        io.set(faults(hold_writes=True))
        x, w = _inputs()
        with actckpt.region(_per_op) as region:
            y = _program(x, w)  # would hang if it waited
        assert _moved(region.report()) == 16 * _KIB  # all that the window takes
        io.set(faults())
        flush()
        assert_equal(torch.autograd.grad(y, (x, w)), _plain())


@pytest.mark.parametrize("has_room", [True, False])
def test_what_found_no_room_is_watched_for_changes_as_any_that_is_kept(has_room: bool, tmp_path: Path) -> None:
    with _scripted(tmp_path) as store:
        store.has_room = has_room
        x, w = _inputs()
        with actckpt.region(_per_op):
            h = torch.mm(x, w)
            y = h.sin().sum()
        flush()
        torch.autograd.grad(y, (x, w), retain_graph=True)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed"):
            torch.autograd.grad(y, (x, w))


def test_bytes_held_for_replay_alone_prefer_to_move_too(tmp_path: Path) -> None:
    with _scripted(tmp_path):
        x, w = _inputs()
        with actckpt.region(_per_op) as region:
            y = (torch.mm(x, w) + 1).sin().sum()  # `sin` saves the sum, which is replayed from the matmul
        assert region.report().offloaded_bytes == 16 * _KIB
        grads = torch.autograd.grad(y, (x, w))
    x, w = _inputs()
    assert_equal(grads, torch.autograd.grad((torch.mm(x, w) + 1).sin().sum(), (x, w)))
