"""Every block of code in docs/libraries.md and docs/transformers.md runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from torchvision_stub import import_timm

_PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("libraries.md", "transformers.md")]
_BLOCKS = [block for page in _PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


# PEFT uses what Transformers deprecated; Lightning has advice on the example.
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("block", _BLOCKS, ids=range(len(_BLOCKS)))
def test_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_timm()
    if "torchtitan" in block:  # the block changes it
        module = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        monkeypatch.setattr(module, "ptd_checkpoint_wrapper", module.ptd_checkpoint_wrapper)
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_there_are_blocks() -> None:
    assert len(_BLOCKS) >= 8
