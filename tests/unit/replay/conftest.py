"""Settings of replays that programs cannot change."""

from collections.abc import Callable, Iterator

import pytest
from oracle import CountOperators

import actckpt
from actckpt import _C, _bind
from actckpt._replay import windows


@pytest.fixture
def counters_only_observe() -> None:
    """Say that the counter of the oracle changes nothing: below other modes, nothing is replayed."""
    actckpt.configure(observers=[CountOperators])  # until the fixture of all tests puts it back


@pytest.fixture
def no_audit() -> None:
    """Let nothing that is wrong be put right by an audit."""
    actckpt.configure(audit="off")


@pytest.fixture
def windows_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Let windows bound what waits in a backward from so many bytes on, in the place of 4 MiB; 0: wherever they can."""

    def bound(nbytes: float) -> None:
        small_bytes = int(min(nbytes, 2**62))
        monkeypatch.setattr(windows, "SMALL_BYTES", small_bytes)
        monkeypatch.setattr(windows, "LEAST_GAIN", 4 if small_bytes else 1)
        _C.connect(_bind.NAMES | {"small_window_bytes": small_bytes})

    yield bound
    _C.connect(_bind.NAMES)
