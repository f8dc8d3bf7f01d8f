"""DDP and FSDP on one GPU with NCCL: gradients of plain training, and no more bytes than with torch's checkpoint.

There is one rank: torch leaves some collectives out then, and copies instead. tests/distributed has two ranks, of CPUs;
here are the streams on which sharded parameters come and go, and their memory, which is freed and filled again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_oracle import run_in_process

KINDS = (
    "ddp",
    "ddp, static graph",
    "ddp, buckets are gradients",
    "fsdp1",
    "fsdp1, original parameters",
    "fsdp2",
    "fsdp2, no reshard",
    "fsdp2, mixed precision",
)
_METHODS = ["rerun", "replay", "list", "offload by operator", "budget"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_equal_and_bytes_and_collectives_no_more(kind: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("sharded_program.py"))
    ran = run_in_process(program, str(tmp_path / "store"), kind, timeout_s=150, OMP_NUM_THREADS="1")
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    what = "\n".join([*map(str, rows), ran.stderr[-4000:]])
    assert [row["method"] for row in rows] == _METHODS, what
    assert all(row["error"] is None for row in rows), what
    for row in rows:
        assert row["same collectives"], what
        assert row["method"] == "offload by operator" or row["held"][0] <= row["held"][1], what
        assert row["peak"][0] <= 1.01 * row["peak"][1], what
