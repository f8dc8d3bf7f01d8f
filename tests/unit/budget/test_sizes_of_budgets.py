"""What people may write for a budget, in bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actckpt._budget import sizes

_CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: 60 * 2**30)
    monkeypatch.setattr(sizes, "total_host_bytes", lambda: 100 * 2**30)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("70GiB", 70 * 2**30),
        ("70 GB", 70 * 10**9),
        (2**30, 2**30),
        (8e9, 8 * 10**9),
        (0.9, 90 * 2**30),
        ("90%", 90 * 2**30),
        (1.0, 100 * 2**30),
        ("auto", 0.95 * 64 * 2**30),
    ],
)
def test_a_budget_for_everything_in_bytes(budget: object, nbytes: float) -> None:
    assert sizes.budget_bytes(budget, _CPU, held_bytes=4 * 2**30) == pytest.approx(nbytes)


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("40%", 400 * 1024),
        (0.4, 400 * 1024),
        (1.0, 1000 * 1024),
        (2e9, 2 * 10**9),
        ("33.3%", 333 * 1024),
        ("0.05 %", 1024),
        ("4GiB", 4 * 2**30),
        (1000, 1000),
    ],
)
def test_a_budget_for_activations_in_bytes(budget: float | str, nbytes: int) -> None:
    """Shares are rounded up to whole KiB."""
    assert sizes.activation_budget_bytes(budget, plain_bytes=1000 * 1024.0) == nbytes


#: Reads each argument.
_TAKE: dict[str, Callable[[Any], float]] = {
    "budget": lambda budget: sizes.budget_bytes(budget, _CPU, held_bytes=0.0),
    "activation_budget": lambda budget: sizes.activation_budget_bytes(budget, plain_bytes=1e9),
}
_HINTS: dict[str, list[tuple[object, str]]] = {
    "budget": [
        (float("nan"), r"is not a size\. .*'auto'\.$"),
        (-1, r"is not a size\."),
        (-5.0, r"is not a size\."),
        (40, r"is 40 bytes, less than 1\.00 MiB\. .*like '40GiB'"),
        (70.0, r"is 70 bytes, less than 1\.00 MiB\. .*like '70GiB'"),
        ("40", r"has no unit\. .*'40%'.*'40GiB' or '40GB'"),
        ("0.4", r"has no unit\. .*'40%'"),
        ("150%", r"is no share\. .*at most '100%'"),
        ("80G", r"Did you mean '80GiB' or '80GB'\?"),
        ("1,5 gib", r"Did you mean '1\.5gib'\?"),
        ("5e3MiB", r"Did you mean '5000MiB'\?"),
        ("all", r"is not a size\. .*a share of the device like '90%'.*, or 'auto'\.$"),
        ("0G", r"or 'auto'\.$"),
        ("1e30MiB", r"or 'auto'\.$"),
        *((none, "") for none in ("2000", "-2GiB", "150%", "NaNGiB", 0.0, 1.01, 24, 2**20 - 1, True, None)),
    ],
    "activation_budget": [
        (float("nan"), r"is not a size\. .*whole number\.$"),
        (-1, r"is not a size\. Pass a share like '50%'"),
        (1.5, r"is 1\.5 bytes\. .*'1\.5%'\?$"),
        (70.0, r"is 70 bytes\. .*'70%'\?$"),
        ("40", r"has no unit\. .*'40%'"),
        ("0.4", r"has no unit\. .*'40%'"),
        ("1e9", r"has no unit\. .*'50%'"),
        ("-10%", r"is no share\. .*at most '100%'"),
        ("4G", r"Did you mean '4GiB' or '4GB'\?"),
        ("auto", r"Pass budget='auto'\."),
        (0, r"is 0 bytes, and a step needs some\. Pass a share"),
        ("0GiB", r"is 0 bytes, and a step needs some\. Pass a share"),
        ("0%", r"is no share\."),
        (True, r"is not a size\."),
        (math.inf, r"is not a size\."),
        ("4Gb", r"'Gb' are bits\."),
    ],
}


@pytest.mark.parametrize(
    ("what", "budget", "hint"), [(what, *case) for what, cases in _HINTS.items() for case in cases]
)
def test_an_error_about_a_budget_says_what_was_meant(what: str, budget: object, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"^{what}={re.escape(repr(budget))} (.* )?{hint}"):
        _TAKE[what](budget)


_WRONG = [0, 1, 40, 70.0, 1.5, 2.0, -1, 1e30, "0", "1", "1.0", "0.4", "40", "70.5", "1e9", "-5", "150%", "-10%", "0%"]
_WRONG += ["%", "4G", "4Gb", "0G", "0.0001K", "1e30MiB", "5e3MiB", "1,5 gib", "80 gigs", "all", "", True, None]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("wrong", _WRONG)
def test_what_errors_about_budgets_suggest_is_taken(wrong: object) -> None:
    for what, take in _TAKE.items():
        try:
            take(wrong)
        except ValueError as error:
            words = str(error).removeprefix(f"{what}={wrong!r}")
            suggested = re.findall(r"(?:like|than|most|or|mean) (?:'([^']+)'|(\d\.\d)\b)", words)
            assert suggested
            for text, number in suggested:
                assert take(text or float(number)) > 0, f"{what}={wrong!r}: {text or number}"
