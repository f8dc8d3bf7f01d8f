"""Cost tables that several tests use."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_ROOT = Path(__file__).parents[3]
#: The package without its own module, which imports torch.
_WITHOUT_TORCH = f"""
import sys, types
sys.modules["torch"] = None
package = types.ModuleType("actckpt")
package.__path__ = [{str(_ROOT / "actckpt")!r}]
sys.modules["actckpt"] = package
"""


@pytest.fixture(scope="session")
def llama() -> SimpleNamespace:
    """Builders of cost tables of the shape of Llama."""
    return SimpleNamespace(**runpy.run_path(str(_ROOT / "benchmarks/llama_costs.py")))


@pytest.fixture
def table() -> dict[str, Any]:
    """A cost table that uses every field."""
    attention = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "working_set_bytes": 40,
        "gradient_bytes": 3,
        "rerun": True,
        "values": [
            {"name": "x0", "bytes": 10},
            {"name": "qkv", "bytes": 30, "recompute_s": 0.5, "inputs": ["x0"], "needed": False, "offloadable": False},
            {"name": "out", "bytes": 10, "recompute_s": 0.25, "inputs": ["qkv"], "replayable": True},
        ],
    }
    return {
        "version": 1,
        "classes": {"attention": attention, "head": {"forward_s": 1, "backward_s": 1, "working_set_bytes": 5}},
        "stack": ["attention", "attention", "head"],
        "fixed_bytes": 7,
        "d2h_bytes_per_s": 4.0,
        "h2d_bytes_per_s": 5.0,
        "host_bytes": 15,
    }


@pytest.fixture
def run_without_torch() -> Callable[..., str]:
    """A function that runs code in a process that has no torch, with data as JSON on its input; what it prints."""

    def run(code: str, data: Any = None, **environment: str) -> str:
        command = [sys.executable, "-c", _WITHOUT_TORCH + code]
        env = {**os.environ, **environment}
        return subprocess.run(
            command, env=env, input=json.dumps(data), check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    return run
