"""Is a method's training the same as plain training, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterable

from actckpt.demo.train import MethodResult

__all__ = ["find_differences"]

_ADVICE = "Its gradients are not those of plain training; report it with the JSON file of this run."


def find_differences(results: Iterable[MethodResult]) -> list[str]:
    """Compare every result with the first, in bits.

    Args:
        results: the reference, then the methods to check.

    Returns:
        One message per method that differs: its name, the first step or parameter, both values in hex.
    """
    reference, *others = results
    found = (_first_difference(reference, other) for other in others)
    return [message for message in found if message is not None]


def _first_difference(reference: MethodResult, other: MethodResult) -> str | None:
    for step, (expected, got) in enumerate(zip(reference.losses, other.losses, strict=True), start=1):
        if expected.hex() != got.hex():
            return (
                f"{other.method} differs from {reference.method} at step {step}: "
                f"loss {got.hex()} ({got:.6f}) instead of {expected.hex()} ({expected:.6f}). {_ADVICE}"
            )
    for name, expected_digest in reference.digests.items():
        if (got_digest := other.digests.get(name)) != expected_digest:
            return (
                f"{other.method} differs from {reference.method} after step {len(reference.losses)}: "
                f"{name} has SHA-256 {got_digest} instead of {expected_digest}. {_ADVICE}"
            )
    return None
