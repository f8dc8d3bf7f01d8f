"""The example that trains on two ranks runs as users start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_example_runs() -> None:
    example = _ROOT / "examples" / "fsdp2_two_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plain, ours = (float(mib) for mib in re.findall(r"peak (\d+\.\d) MiB", done.stdout))
    assert ours < plain
