"""Programs that two processes run which gloo connects."""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["printed_by_two_ranks"]


def printed_by_two_ranks(program: str, *args: str) -> list[Any]:
    """Run a program on two ranks; returns what the first one printed, of the lines that are tuples."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(Path(__file__).parent), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(), "WORLD_SIZE": "2"}
    common |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", program, *args],
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), outputs
    return [ast.literal_eval(line) for line in outputs[0][0].splitlines() if line.startswith("(")]


def _port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
