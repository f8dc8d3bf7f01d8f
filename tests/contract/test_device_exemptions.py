"""The table of tests that do not run on the simulated device names tests that there are, and few of them."""

from __future__ import annotations

from pathlib import Path

import device_exemptions
import pytest

FOLDERS = ("offload", "replay", "rerun")
_NAMES = {*device_exemptions.EXEMPT, *device_exemptions.EXEMPT_ON_GPU, *device_exemptions.CHANGING}


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def test_exempt_tests_exist_and_are_at_most_a_tenth() -> None:
    here, collected = Path(__file__).parent, _Collected()
    folders = [str(here / folder) for folder in FOLDERS]
    files = {str(here.parent / key.partition("::")[0]) for key in _NAMES if key.startswith("contract/")}
    assert pytest.main([*folders, *files, "--collect-only", "-qq"], plugins=[collected]) == 0
    items = [item for item in collected.items if item.path.parent.name in FOLDERS]
    found = [item for item in items if device_exemptions.why_exempt(item)]
    assert 0 < len(found) * 10 <= len(items)
    assert all((here / name).exists() for name in device_exemptions.FILES)
    for key in _NAMES:
        name, needed = device_exemptions.split(key)
        named = (words for test, words in map(device_exemptions.words_of, collected.items) if test == name)
        assert any(needed <= words for words in named), f"{key}: no such test"
