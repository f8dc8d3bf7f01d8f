"""Real text that every machine with Python has: the source of the standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["batches", "read_text"]

_LIMIT_BYTES = 4 * 2**20


def read_text(folder: Path | None = None) -> torch.Tensor:
    """Read Python source, one module after the other in the order of their names.

    Args:
        folder: where the `.py` files are; None means the standard library's top level.

    Returns:
        Byte values, uint8 of shape (N,), N at most 4 MiB.

    Raises:
        FileNotFoundError: there is no source, as in an installation from compiled files or a zip archive.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= _LIMIT_BYTES:
            break
        text += path.read_bytes()
    if not text:
        raise FileNotFoundError(
            f"the demo trains on the standard library's source, but {folder} holds 0 bytes of *.py files; "
            "run it with a Python that was installed with its source."
        )
    return torch.frombuffer(text[:_LIMIT_BYTES], dtype=torch.uint8)


def batches(text: torch.Tensor, *, batch: int, seq: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw random stretches of text forever, the same ones for the same seed.

    Args:
        text: uint8 (N,) on the CPU.
        batch: B, sequences per batch.
        seq: S, bytes per sequence.
        seed: of a generator of its own, so that a model's dropout does not change what it reads.

    Yields:
        Inputs and the bytes that follow each of them, both int64 (B, S).

    Raises:
        ValueError: the text is too short for one sequence and the byte after it.
    """
    if len(text) < seq + 1:
        raise ValueError(f"--seq is {seq}, but the text has only {len(text)} bytes; try --seq {len(text) - 1}.")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seq + 1)
    while True:
        starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
        rows = text[starts + offsets].long()
        yield rows[:, :-1], rows[:, 1:]
