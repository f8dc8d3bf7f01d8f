"""`stats()` counts each reason for which a tensor stays by its name, over all stores of the process."""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sim
import torch

import actckpt
from actckpt import _C, config
from actckpt._offload import counts, notices, stores
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore

PAGE = 4096
REASONS = ("kept_full", "kept_failed", "kept_busy", "kept_capturing", "failed_writes")


@pytest.fixture(autouse=True)
def _stores_of_our_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(stores._stores)
    stores._stores.clear()
    monkeypatch.setattr(notices, "_warned", set())
    actckpt.reset_stats()
    yield
    actckpt.reset_stats()
    stores._stores.clear()
    stores._stores.update(before)


def _kept() -> dict[str, int]:
    found = actckpt.stats()
    return {name: getattr(found, name) for name in REASONS if getattr(found, name)}


def _train(store: CpuStore, count: int = 3) -> None:
    """Save `count` tensors of a page each, and bring them back."""
    stores._stores["cpu"] = config.generation, store
    xs = [torch.randn(PAGE // 4, requires_grad=True) for _ in range(count)]
    hs = [x * 1.5 for x in xs]
    with actckpt.offload(min_bytes=0):
        ys = [h.sin() for h in hs]
    store.flush()
    for x, h, y in zip(xs, hs, ys, strict=True):
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], h.detach().cos() * 1.5)


def _failing_disk(folder: str, code: int) -> CpuStore:
    io, faults = sim.FaultyFileIo(), sim.Faults()
    faults.fail_write_at, faults.write_errno = 0, code
    io.set(faults)
    return sim.disk_store(folder, io)


#: Stores, what each counts of three tensors, and what is logged.
DISKS: dict[str, tuple[Callable[[str], CpuStore], dict[str, int], str]] = {
    "good": (CpuStore.on_disk, {}, ""),
    "limited": (lambda folder: CpuStore.on_disk(folder, limit_bytes=2 * PAGE), {"kept_full": 1}, "full.*disk_limit"),
    "full": (
        lambda folder: _failing_disk(folder, errno.ENOSPC),
        {"failed_writes": 3},
        "is full.*nothing is lost.*No space left on device",
    ),
    "broken": (
        lambda folder: _failing_disk(folder, errno.EIO),
        {"failed_writes": 3},
        "Writing to the spill file fails.*nothing is lost.*errno 5",
    ),
}


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", DISKS)
def test_what_a_disk_does_not_take_is_counted_and_told_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, counts_of_store, words = DISKS[name]
    for number in (1, 2):  # another store of the same process says nothing new, and the sums go on
        _train(make(str(tmp_path)))
        assert _kept() == {reason: number * count for reason, count in counts_of_store.items()}
    messages = _logged(caplog)
    assert len(messages) == bool(words) and all(re.search(words, message, re.DOTALL) for message in messages)


def test_a_full_limit_and_a_broken_disk_are_two_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("limited", "broken"):
        _train(DISKS[name][0](str(tmp_path)))
    assert len(_logged(caplog)) == 2


def test_sums_outlive_their_store_and_reset_sets_them_to_zero(tmp_path: Path) -> None:
    _train(CpuStore.on_disk(str(tmp_path), limit_bytes=0))
    stores._stores.clear()
    gc.collect()
    assert _kept() == {"kept_full": 3}
    actckpt.reset_stats()
    assert _kept() == {}


class _Device:
    """An engine over a mock of the driver."""

    def __init__(self, *, pinned: int, **options: Any) -> None:
        self.cuda = sim.MockCuda()
        options = {"window_bytes": 1 << 20, **options}
        self.engine = self.cuda.engine(limit_bytes=pinned, release=lambda keep, uses: None, **options)
        stores._stores["cuda"] = config.generation, DeviceStore(self.engine, sim.OneStream("cuda"))
        self.count = 0

    def put(self, *, must: bool = True) -> _C.DeviceTicket | _C.Kept:
        self.count += 1
        return self.engine.put((1 << 60) + self.count * PAGE, PAGE, 0, 0, object(), must=must)


def test_each_reason_on_a_device_has_its_name(tmp_path: Path) -> None:
    full = _Device(pinned=PAGE)
    held = [full.put() for _ in range(3)]
    capturing = _Device(pinned=PAGE)
    capturing.cuda.set_capturing(0, True)
    assert capturing.put() == _C.Kept.CAPTURING
    assert _kept() == {"kept_full": 2, "kept_capturing": 1}
    busy = _Device(pinned=0, spill_file=_C.SpillFile(str(tmp_path)), bounce_bytes=2 * PAGE, buffer_bytes=PAGE)
    held += [busy.put(must=False), busy.put(must=False)]
    assert held[-1] == _C.Kept.BUSY
    failing = _Device(pinned=1 << 20)
    failing.put()
    failing.cuda.fail_at(1, 700)
    assert {failing.put(), failing.put()} <= {_C.Kept.STRANDED, _C.Kept.FAILED}
    assert _kept() == {"kept_full": 2, "kept_capturing": 1, "kept_busy": 1, "kept_failed": 2}


def test_a_store_that_ends_while_its_figures_are_summed_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may end a store anywhere, in this very loop too."""
    ending = CpuStore.on_disk(str(tmp_path))
    _train(ending)
    before = counts.sums()
    assert before["prefetched_reloads"] + before["late_reloads"] > 0
    held = [ending]
    del ending
    stores._stores.clear()
    count = counts._sums_of

    def counted(found: _C.DeviceStats) -> dict[str, float]:
        held.clear()
        gc.collect()
        return count(found)

    other = CpuStore.on_disk(str(tmp_path))
    monkeypatch.setattr(counts, "_sums_of", counted)
    assert counts.sums() == before
    assert counts.sums() == before
    assert not held and other.engine is not None


def test_stats_print_with_units_and_without_zeros(tmp_path: Path) -> None:
    assert "offloaded_bytes" not in str(actckpt.stats())
    _train(CpuStore.on_disk(str(tmp_path)), count=4)
    lines = dict(line.split(maxsplit=1) for line in str(actckpt.stats()).splitlines())
    assert lines["offloaded_bytes"] == "16.00 KiB"
    assert all(text not in ("0", "0 B") for text in lines.values())
    assert "kept_full" not in lines
    assert repr(actckpt.stats()).startswith("Stats(offloaded_bytes=16.00 KiB, ")


def test_seconds_print_as_seconds() -> None:
    found = dataclasses.replace(actckpt.stats(), stall_seconds=0.01234)
    assert "stall_seconds=12.34 ms" in repr(found)
    zeros = dataclasses.replace(found, **{field.name: 0 for field in dataclasses.fields(found)})
    assert str(zeros) == "nothing moved, rerun or replayed"


def _policy_of_mine(info: actckpt.SavedTensorInfo) -> actckpt.Action:
    return actckpt.Action.KEEP


def test_regions_say_what_they_are() -> None:
    region = actckpt.region("recompute")
    assert repr(region) == "<actckpt.region('recompute')>"
    with region:
        assert repr(region) == "<actckpt.region('recompute'), open>"
    assert repr(actckpt.region(_policy_of_mine)) == "<actckpt.region(_policy_of_mine)>"
    assert repr(actckpt.region(actckpt.policies.PerOp({"aten.mm.default": "keep"}))) == (
        "<actckpt.region(PerOp({aten.mm.default: keep}, default=recompute))>"
    )


def _offload(count: int, numel: int, **options: int) -> tuple[int, int]:
    """Save `count` tensors in a block; return how many stayed for their size, and how many blocks moved nothing."""
    actckpt.reset_stats()
    hs = [torch.randn(numel, requires_grad=True) * 1.5 for _ in range(count)]
    with actckpt.offload(**options):
        ys = [h.sin() for h in hs]
    del ys
    found = actckpt.stats()
    return found.kept_small, found.idle_offloads


def test_tensors_below_min_bytes_are_counted() -> None:
    assert _offload(3, PAGE // 4) == (3, 1)
    assert _offload(3, PAGE // 4, min_bytes=PAGE + 1) == (3, 1)
    assert _offload(3, PAGE // 4, min_bytes=PAGE) == (0, 0)
    assert _offload(3, 0) == (0, 1), "what has no bytes is not small, but nothing was moved"


def test_blocks_that_move_nothing_are_counted() -> None:
    with torch.no_grad():
        assert _offload(3, PAGE // 4, min_bytes=0) == (0, 1)
    assert _offload(0, 0) == (0, 1)
    actckpt.reset_stats()
    weight = torch.nn.Parameter(torch.randn(PAGE))
    for _ in range(2):
        with actckpt.offload(min_bytes=0):
            weight.sin()
    assert (actckpt.stats().kept_small, actckpt.stats().idle_offloads) == (0, 2), "parameters stay"


def test_a_block_inside_of_a_rerun_moves_nothing_for_another_reason() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload(min_bytes=0):
            return (x * 2).sin().exp()

    x = torch.randn(PAGE, requires_grad=True)
    actckpt.reset_stats()
    actckpt.checkpoint(function, x).sum().backward()
    assert actckpt.stats().idle_offloads == 0
