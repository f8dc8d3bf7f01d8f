"""How long something takes says how busy the machine is: properties have no time limit, commands never call it slow."""

import hypothesis
import pytest

from actckpt._commands import messages

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _quiet_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 600.0)
