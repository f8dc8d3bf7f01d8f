"""Print the table of docs/distributed.md: `PYTHONPATH=. python tests/distributed/table.py`."""

from __future__ import annotations

from pool import Ranks
from training import Found, compare, reference

_KINDS = [
    ("test_data_parallel", "ddp"),
    ("test_data_parallel", "fsdp1"),
    ("test_data_parallel", "fsdp2"),
    ("test_data_parallel", "hsdp"),
    ("test_model_parallel", "tensor parallel"),
    ("test_model_parallel", "sequence parallel"),
    ("test_experts", "experts"),
]


def row_of(module: str, kind: str) -> list[str]:
    """Return what is held after the forward of a step, and how many collectives run in its backward."""

    def cell(found: Found) -> str:
        return f"{found.held_bytes / 1024:.1f} KiB, {len(found.in_backward)}"

    cells = [cell(reference(module, kind, "plain"))]
    for method in ("rerun", "replay", "list"):
        ours, theirs = compare(module, kind, method)
        cells += [cell(theirs), cell(ours)] if method != "replay" else [cell(ours)]
    return cells


def main() -> None:
    head = ["", "plain", "torch", "`recompute`", "`[]`", "torch, list", "list"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    ranks = Ranks()
    for module, kind in _KINDS:
        print("| " + " | ".join([kind, *ranks.run(row_of, module, kind)[0]]) + " |", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
