"""`actckpt doctor` says what runs here and why."""

from pathlib import Path

import pytest
import torch

import actckpt
from actckpt import _C
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._core.nvml import GpuFacts
from actckpt.cli import main
from actckpt.doctor import examine
from actckpt.te.internals import read_already


def test_every_finding_is_one_line_and_names_its_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = [line[:24].strip() for line in lines]
    assert {"actckpt", "torch", "offload of GPU tensors", "offload of CPU tensors", "spill folder"} <= set(topics)
    assert all(topics)


def test_disk_bandwidth_is_measured(tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path)
    findings = dict(examine())
    assert "GB/s" in findings["disk"]
    assert str(tmp_path) in findings["spill folder"]


def test_without_a_gpu_it_says_why_gpu_tensors_stay() -> None:
    if torch.accelerator.is_available():
        pytest.skip("says what it says without a GPU")
    assert dict(examine(measure=False))["offload of GPU tensors"].startswith("off: torch finds no GPU")


class _Two(Accelerator):
    """Two devices, of which the vendor's library knows the first one."""

    def __init__(self) -> None:
        super().__init__("xpu")

    def device_count(self) -> int:
        return 2

    def name_of(self, device: torch.device) -> str:
        return f"model {device.index}"

    def memory_info(self, device: torch.device) -> tuple[int, int] | None:
        return (3 << 30, 80 << 30) if device.index == 0 else None

    def facts_of(self, device: torch.device) -> GpuFacts | None:
        return GpuFacts(3 << 30, 80 << 30, 5, 16, 1) if device.index == 0 else None


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> _Two:
    found = _Two()
    monkeypatch.setattr(devices, "available", lambda: found)
    monkeypatch.setitem(devices._accelerators, "xpu", found)
    return found


def test_each_device_tells_its_memory_its_link_and_its_node(two: _Two) -> None:
    findings = dict(examine(measure=False))
    assert findings["gpu"] == "model 0, model 1"
    assert findings["xpu:0"] == "3.0 GiB free of 80.0 GiB, PCI Express 5 x16, NUMA node 1"
    assert findings["xpu:1"] == "nobody tells its memory"
    off = findings["offload of GPU tensors"]
    assert off.startswith("off: the engine cannot move tensors of 'xpu' devices: it has no backend")


def test_the_driver_that_copies_is_named(two: _Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.driver_library = "libno-such-driver.so.1"
    assert "no driver libno-such-driver.so.1" in dict(examine(measure=False))["offload of GPU tensors"]
    monkeypatch.setattr(_C, "why_no_driver", lambda library: "")
    on = dict(examine(measure=False))["offload of GPU tensors"]
    assert on.startswith("on: pinned host memory") and on.endswith("driver: libno-such-driver.so.1")


def test_versions_of_transformer_engine_that_were_read_are_known_and_doctor_says_how_to_install_it() -> None:
    for version in ("2.9", "2.9.0+cu13", "2.14.1", "2.20.2"):
        assert read_already(version)
    for version in ("2.8", "1.13", "2.20.3", "2.21", "3.0", "unknown"):
        assert not read_already(version)
    assert dict(examine(measure=False))["transformer engine"].startswith("not installed: pip install")
