"""`PREFER_OFFLOAD` moves what costs no waiting: never waits for room, and learns from the stalls of earlier steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sim
import torch
from offload_oracle import PythonStore, flush, store_on_disk, store_on_file, using
from oracle import assert_equal, leaf
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt import _C, Action, config
from actckpt._offload import stores
from actckpt._replay import audit

_MM = torch.ops.aten.mm.default
_KIB = 1024


@pytest.fixture(autouse=True)
def _nothing_learnt() -> None:
    audit._by_code.clear()
    audit._by_object.clear()


@dataclasses.dataclass
class _Stall:
    stall_seconds: float = 0.0
    is_settled: bool = True

    @property
    def is_late(self) -> bool:
        return self.stall_seconds > 0


class _Ticket:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.timing = _Stall()

    def unload(self) -> None:
        self.inner.unload()


class _ScriptedStore(PythonStore):
    """A store that says how long the program waited for tensors of each size, and that may find no room."""

    stall_of_size: dict[int, float]
    has_room = True

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        if not (must or self.has_room):
            return None
        return _Ticket(super().put(source, nbytes, must=True))  # a device whose copies are late has none at once

    def fetch(self, ticket: _Ticket, nbytes: int, device: torch.device) -> _C.Bytes:
        ticket.timing.stall_seconds += self.stall_of_size.get(nbytes, 0.0)
        return super().fetch(ticket.inner, nbytes, device)

    def prefetch(self, ticket: _Ticket, nbytes: int, device: torch.device) -> _C.Bytes | None:
        return super().prefetch(ticket.inner, nbytes, device)


@contextmanager
def _scripted(folder: Path, stall_of_size: dict[int, float] | None = None) -> Iterator[_ScriptedStore]:
    store = _ScriptedStore(store_on_disk(str(folder)))
    store.stall_of_size = stall_of_size or {}
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


def _torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_CPU_OFFLOAD if op is _MM else CheckpointPolicy.PREFER_RECOMPUTE


_per_op = actckpt.policies.PerOp({_MM: Action.PREFER_OFFLOAD})
_POLICIES: dict[str, Any] = {
    "name": "prefer_offload",
    "action": Action.PREFER_OFFLOAD,
    "operators": _per_op,
    "value function": lambda info: Action.PREFER_OFFLOAD if info.op is _MM else Action.RECOMPUTE,
    "torch's function": _torch_policy,
}


def _step(policy: Any, calls: int = 1) -> tuple[tuple[Tensor, ...], list[actckpt.regions.Report]]:
    """Return the gradients of one step, and the report of each of its regions."""
    x, w = _inputs()
    loss: Any = 0.0
    reports = []
    for _ in range(calls):
        with actckpt.region(policy) as region:
            loss = loss + _program(x, w)
        reports.append(region.report())
    flush()
    return torch.autograd.grad(loss, (x, w)), reports


def _plain(calls: int = 1) -> tuple[Tensor, ...]:
    x, w = _inputs()
    loss: Any = 0.0
    for _ in range(calls):
        loss = loss + _program(x, w)
    return torch.autograd.grad(loss, (x, w))


def _moved(report: actckpt.regions.Report) -> int:
    """Return how many bytes of matmuls were moved."""
    return sum(row.offloaded_bytes for row in report.rows if row.operator == "aten.mm.default")


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES.keys())
def test_every_form_of_policy_offloads_where_nobody_waits(policy: Any, tmp_path: Path) -> None:
    if policy is _torch_policy and not hasattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD"):
        pytest.skip(f"torch {torch.__version__} has no CheckpointPolicy.PREFER_CPU_OFFLOAD")
    with _scripted(tmp_path):
        for _ in range(4):
            grads, (report,) = _step(policy)
            assert_equal(grads, _plain())
            assert _moved(report) == (16 + 32 + 64) * _KIB


@pytest.mark.parametrize("action", [Action.PREFER_OFFLOAD, Action.OFFLOAD])
def test_what_finds_no_room_at_once_stays_if_it_only_prefers_to_move(action: Action, tmp_path: Path) -> None:
    with _scripted(tmp_path) as store:
        store.has_room = False
        grads, (report,) = _step(actckpt.policies.PerOp({_MM: action}))
    assert_equal(grads, _plain())
    if action is Action.OFFLOAD:
        assert _moved(report) == (16 + 32 + 64) * _KIB
        return
    assert _moved(report) == 0
    (row,) = [row for row in report.rows if row.operator == "aten.mm.default"]
    assert row.kept_bytes == (16 + 32 + 64) * _KIB
    assert row.not_replayed == {"no store takes it or had room for it at once": 3}


def test_forward_does_not_wait_for_a_disk_that_is_behind(tmp_path: Path) -> None:
    io = sim.FaultyFileIo()
    store = store_on_file(sim.spill_file(str(tmp_path), io), window_bytes=20 * _KIB, num_workers=1)
    faults = sim.Faults()
    faults.hold_writes = True
    io.set(faults)
    with using(store):
        x, w = _inputs()
        with actckpt.region(_per_op) as region:
            y = _program(x, w)  # would hang if it waited
        assert _moved(region.report()) == 16 * _KIB  # all that the window takes
        io.set(sim.Faults())
        flush()
        assert_equal(torch.autograd.grad(y, (x, w)), _plain())


def test_what_made_earlier_steps_wait_stays_from_the_third_step_on(tmp_path: Path) -> None:
    with _scripted(tmp_path, {32 * _KIB: 4.0, 64 * _KIB: 1.0}):
        results = [_step(_per_op) for _ in range(5)]
    for grads, _ in results:
        assert_equal(grads, _plain())
    moved = [_moved(report) // _KIB for _, (report,) in results]
    assert moved == [112, 112, 80, 16, 16]  # first the worst, half of the stall; then the other
    assert "an earlier step waited for it" in str(results[-1][1][0])


def test_new_settings_begin_to_learn_anew(tmp_path: Path, device: str) -> None:
    with _scripted(tmp_path, {32 * _KIB: 4.0}) as store:
        for _ in range(3):
            report = _step(_per_op)[1][0]
        assert _moved(report) == 80 * _KIB
        actckpt.configure(max_inflight=config.settings().max_inflight)
        stores._stores[device] = config.generation, store
        assert _moved(_step(_per_op)[1][0]) == 112 * _KIB


def test_what_must_move_moves_however_long_it_takes(tmp_path: Path) -> None:
    with _scripted(tmp_path, {32 * _KIB: 4.0}):
        moved = [_moved(_step(actckpt.policies.PerOp({_MM: Action.OFFLOAD}))[1][0]) // _KIB for _ in range(4)]
    assert moved == [112] * 4


def test_regions_that_one_line_opens_are_planned_apart(tmp_path: Path) -> None:
    with _scripted(tmp_path) as store:
        fetch = store.fetch
        num_fetched = [0]

        def late_at_first(ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
            num_fetched[0] += 1
            ticket.timing.stall_seconds += 1.0 if step < 3 and num_fetched[0] <= 1 else 0.0
            return fetch(ticket, nbytes, device)

        store.fetch = late_at_first  # type: ignore[method-assign]
        for step in range(6):
            num_fetched[0] = 0
            grads, reports = _step(_per_op, calls=3)
            assert_equal(grads, _plain(calls=3))
            moved = [_moved(report) // _KIB for report in reports]
            # Backward reads what the last region saved last first, and waits for it.
            assert moved == [112, 112, [112, 112, 48, 16, 16, 16][step]]


def test_a_demoted_tensor_is_watched_for_changes_as_any_that_is_kept(tmp_path: Path) -> None:
    with _scripted(tmp_path, {16 * _KIB: 1.0}):
        for _ in range(4):
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


def _apply_to_layers(model: torch.nn.Module) -> None:
    actckpt.apply(model, policy="prefer_offload", blocks=torch.nn.Linear)


def test_apply_takes_it_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    x = torch.randn(8, 32)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    _apply_to_layers(model)
    with _scripted(tmp_path):
        for _ in range(3):
            model.zero_grad()
            model(x).square().sum().backward()
            assert_equal([parameter.grad for parameter in model.parameters()], expected)


def test_bytes_held_for_replay_alone_prefer_to_move_too(tmp_path: Path) -> None:
    with _scripted(tmp_path):
        x, w = _inputs()
        with actckpt.region(_per_op) as region:
            y = (torch.mm(x, w) + 1).sin().sum()  # `sin` saves the sum, which is replayed from the matmul
        assert region.report().offloaded_bytes == 16 * _KIB
        grads = torch.autograd.grad(y, (x, w))
    x, w = _inputs()
    assert_equal(grads, torch.autograd.grad((torch.mm(x, w) + 1).sin().sum(), (x, w)))


def test_where_everything_is_late_nothing_is_moved_any_more(tmp_path: Path) -> None:
    with _scripted(tmp_path, {nbytes * _KIB: 1.0 for nbytes in (16, 32, 64)}):
        moved = [_moved(_step(_per_op)[1][0]) // _KIB for _ in range(10)]
    assert moved[:2] == [112, 112] and moved[5:] == [0] * 5


def test_reading_what_is_kept_begins_to_read_ahead(tmp_path: Path) -> None:
    with _scripted(tmp_path, {64 * _KIB: 1.0}) as store:
        for _ in range(3):
            _step(_per_op)
        calls: list[tuple[str, int]] = []
        prefetch, fetch = store.prefetch, store.fetch

        def note_prefetch(ticket: Any, nbytes: int, device: torch.device) -> bool:
            calls.append(("prefetch", nbytes // _KIB))
            return prefetch(ticket, nbytes, device)

        def note_fetch(ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
            calls.append(("fetch", nbytes // _KIB))
            return fetch(ticket, nbytes, device)

        store.prefetch, store.fetch = note_prefetch, note_fetch  # type: ignore[method-assign]
        _step(_per_op)
    assert calls[:3] == [("prefetch", 32), ("prefetch", 16), ("fetch", 32)]
