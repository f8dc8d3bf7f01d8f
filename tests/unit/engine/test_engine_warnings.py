"""What a device's store keeps, and why, is logged once per process and reason; disks: ../test_statistics.py."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sim

import actckpt
from actckpt import _C, config
from actckpt._offload import notices, spill
from actckpt._offload.cpu import CpuStore


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_warned", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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
