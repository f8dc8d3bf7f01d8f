"""What goes wrong in a store and loses nothing is logged once per process and reason."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sim
import torch
from internals.stores import using

import actckpt
from actckpt import _C, config
from actckpt._offload import notices, spill
from actckpt._offload.cpu import CpuStore


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_warned", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _failing_disk(code: int) -> sim.FaultyFileIo:
    io, faults = sim.FaultyFileIo(), sim.Faults()
    faults.fail_write_at, faults.write_errno = 0, code
    io.set(faults)
    return io


def step(store: CpuStore, count: int = 4) -> None:
    """Move tensors out, let the writes end, bring them back."""
    tensors = [torch.randn(4096, requires_grad=True) * 1 for _ in range(count)]
    with using(store):
        with actckpt.offload(min_bytes=0):
            outputs = [tensor.sin() for tensor in tensors]
        store.flush()
        for tensor, output in zip(tensors, outputs, strict=True):
            assert output.grad_fn is not None and torch.equal(output.grad_fn._saved_self, tensor)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "is full.*No space left on device"), (errno.EIO, "Writing to the spill file fails.*error")],
)
def test_a_disk_that_takes_nothing_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, words: str
) -> None:
    io = _failing_disk(code)
    for _ in range(2):  # another store of the same process says nothing new
        store = sim.disk_store(str(tmp_path), io)
        for _ in range(3):
            step(store)
        assert store.stats().num_failed_writes == 12
    (message,) = warnings(caplog)
    assert re.search(words, message) and "nothing is lost" in message


def test_a_full_limit_and_a_broken_disk_are_two_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step(CpuStore.on_disk(str(tmp_path), limit_bytes=5 * 4096))
    step(sim.disk_store(str(tmp_path), _failing_disk(errno.EIO)))
    first, second = warnings(caplog)
    assert "is full" in first and "Raise disk_limit" in first
    assert "fails" in second and "errno 5" in second


def test_a_good_disk_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step(CpuStore.on_disk(str(tmp_path)))
    assert warnings(caplog) == []


class Engine:
    """Has the counters of a DeviceEngine."""

    def pool_stats(self) -> Any:
        return SimpleNamespace(stored_bytes=3 << 20, limit_bytes=4 << 20)

    def stats(self) -> Any:
        counts = dict.fromkeys((name for name in dir(_C.DeviceStats) if name.startswith("num_")), 0)
        told = {"last_error": "cuX returned (700)", "spill_error": "No space left"}
        return SimpleNamespace(**(counts | told | {"num_failed_writes": 2, "num_full_writes": 2, "stall_seconds": 0.0}))


@pytest.mark.parametrize(
    ("answers", "messages"),
    [
        ([_C.Kept.FULL] * 3, [r"1\.0 MiB.*3\.0 of at most 4\.0 MiB.*host_limit"]),
        ([_C.Kept.BUSY], []),  # what "prefer" keeps is counted only
        ([_C.Kept.BEHIND], []),
        ([_C.Kept.CAPTURING] * 2, ["CUDA graph.*kept_capturing"]),
        (["disk", "disk"], ["the spill file", "is full"]),
        ([_C.Kept.STRANDED, _C.Kept.FAILED], [r"cuX returned \(700\)"]),
    ],
    ids=str,
)
def test_what_an_engine_answers_is_told_once_per_reason(
    answers: list[Any], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = Engine()
    for answer in answers:
        if answer == "disk":
            notices.tell_of_disk(sim.OneStream("cuda"))
            notices.tell_of_writes(engine.stats())
        else:
            notices.tell_kept(engine, answer, 1 << 20, sim.OneStream("cuda"))
    told = warnings(caplog)
    assert len(told) == len(messages)
    assert all(re.search(words, one, re.DOTALL) for words, one in zip(messages, told, strict=True)), told


@pytest.mark.parametrize("folder", ["/proc", "/proc/self/fd", "/sys"])
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no procfs")
def test_folders_that_exist_but_take_no_file_are_refused_also_as_root(folder: str) -> None:
    before = config.settings()
    with pytest.raises(
        ValueError, match=rf"^configure: spill_dir='{folder}' is not a folder that can be .*\.$"
    ) as info:
        actckpt.configure(spill_dir=folder)
    assert "\n" not in str(info.value)
    assert config.settings() == before


def test_a_default_folder_that_takes_no_file_is_one_line_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc")
    monkeypatch.setattr(spill, "_files", {})  # an earlier test may have made one with these settings
    with pytest.raises(_C.OffloadError, match=r"^cannot make a spill file in '/proc': .*Set spill_dir.*$"):
        CpuStore.from_settings(config.Settings())


def test_the_spill_file_is_shared_and_so_is_its_limit(tmp_path: Path) -> None:
    settings = actckpt.configure(spill_dir=tmp_path, disk_limit=1 << 20)
    file = spill.spill_file(settings)
    assert spill.spill_file(settings) is file and file.stats().limit_bytes == 1 << 20
    actckpt.configure(disk_limit=2 << 20)
    assert spill.spill_file(config.settings()).stats().limit_bytes == 2 << 20
