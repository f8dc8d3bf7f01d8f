"""The table of tests that do not run on the simulated device names tests that there are, and few of them."""

from __future__ import annotations

from pathlib import Path

import device_exemptions
import pytest

FOLDERS = ("offload", "replay", "rerun")


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def test_exempt_tests_exist_and_are_at_most_a_tenth() -> None:
    here, collected = Path(__file__).parent, _Collected()
    folders = [str(here / folder) for folder in FOLDERS]
    assert pytest.main([*folders, "--collect-only", "-qq"], plugins=[collected]) == 0
    found = [item for item in collected.items if device_exemptions.why_exempt(item)]
    assert 0 < len(found) * 10 <= len(collected.items)
    for key in {
        **device_exemptions.EXEMPT,
        **device_exemptions.EXEMPT_ON_GPU,
        **dict.fromkeys(device_exemptions.CHANGING),
    }:
        name, needed = device_exemptions.split(key)
        named = (words for test, words in map(device_exemptions.words_of, collected.items) if test == name)
        assert any(needed <= words for words in named), f"{key}: no such test"
