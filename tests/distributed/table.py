"""Print the table of docs/collectives.md: `PYTHONPATH=.:tests/contract python tests/distributed/table.py [JSON]`."""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import sys
from pathlib import Path

import torch
from pool import Ranks
from test_repeated_collectives import POLICIES
from training import Found, applied, compare, reference, train

_KINDS = [
    ("data_parallel", "ddp"),
    ("data_parallel", "fsdp1"),
    ("data_parallel", "fsdp2"),
    ("data_parallel", "hsdp"),
    ("model_parallel", "tensor parallel"),
    ("model_parallel", "sequence parallel"),
    ("experts", "experts"),
]


#: What each column is called in the result and in the page.
COLUMNS = {
    "plain": "plain",
    "torch": "torch",
    "recompute": "`recompute`",
    "replay": "`[]`",
    "named": "named",
    "torch list": "torch, list",
    "list": "list",
    "list, named": "list, named",
}


def row_of(module: str, kind: str) -> dict[str, dict[str, int]]:
    """Return what is held after the forward of a step, and how many collectives run in its backward."""

    def cell(found: Found) -> dict[str, int]:
        return {"held_bytes": found.held_bytes, "collectives_in_backward": len(found.in_backward)}

    (rerun, torch_rerun), (replay, _), (some, torch_some) = (
        compare(module, kind, method) for method in ("rerun", "replay", "list")
    )
    make = importlib.import_module(module).KINDS[kind]
    named, some_named = (train(make, applied(POLICIES[policy]), 3) for policy in ("everything", "list"))
    found = (reference(module, kind, "plain"), torch_rerun, rerun, replay, named, torch_some, some, some_named)
    return {name: cell(one) for name, one in zip(COLUMNS, found, strict=True)}


def main() -> None:
    print("| " + " | ".join(["", *COLUMNS.values()]) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    ranks, figures = Ranks(), {}
    for module, kind in _KINDS:
        row = figures[kind] = ranks.run(row_of, module, kind)[0]
        cells = (f"{one['held_bytes'] / 1024:.1f} KiB, {one['collectives_in_backward']}" for one in row.values())
        print("| " + " | ".join([kind, *cells]) + " |", flush=True)
    ranks.close()
    if len(sys.argv) > 1:
        result = {
            "command": "PYTHONPATH=.:tests/contract python tests/distributed/table.py",
            "date": datetime.date.today().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "figures": figures,
        }
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
