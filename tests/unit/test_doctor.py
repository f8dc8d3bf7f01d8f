"""`actckpt doctor` says what runs here and why."""

from pathlib import Path

import pytest
import torch

import actckpt
from actckpt.cli import main
from actckpt.doctor import examine


@pytest.fixture
def spill_dir(tmp_path: Path) -> Path:
    yield tmp_path
    actckpt.configure(spill_dir=None)


def test_every_finding_is_one_line_and_names_its_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = [line[:24].strip() for line in lines]
    assert {"actckpt", "torch", "offload of GPU tensors", "offload of CPU tensors", "spill folder"} <= set(topics)
    assert all(topics)


def test_disk_bandwidth_is_measured(spill_dir: Path) -> None:
    actckpt.configure(spill_dir=spill_dir)
    findings = dict(examine())
    assert "GB/s" in findings["disk"]
    assert str(spill_dir) in findings["spill folder"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_why_gpu_tensors_stay() -> None:
    assert dict(examine(measure=False))["offload of GPU tensors"].startswith("off: torch finds no GPU")


def test_an_unwritable_folder_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--spill-dir", "/nonexistent"])
    assert leaving.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
