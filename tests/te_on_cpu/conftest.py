"""Every test here runs TransformerEngine's code from the wheel that ACTCKPT_TE_WHEEL names; skipped without one.

`make te` makes an environment with what TransformerEngine needs, downloads the wheel and runs these tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from te_on_cpu.training import Setting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            if "ACTCKPT_TE_WHEEL" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="no wheel of TransformerEngine: make te"))
            item.add_marker(pytest.mark.filterwarnings("default"))  # TransformerEngine's are not ours to judge


@pytest.fixture(scope="session")
def loaded() -> Any:
    """TransformerEngine, loaded once."""
    from te_on_cpu import wheel

    return wheel.load(Path(os.environ["ACTCKPT_TE_WHEEL"]))


@pytest.fixture
def te(loaded: Any) -> Iterator[Any]:
    """TransformerEngine, with its globals as they are after import."""
    from te_on_cpu import training

    training.reset()
    yield loaded
    training.reset()


@pytest.fixture
def anew(te: Any) -> Iterator[None]:
    """The extension is registered at the next region, and has warned of nothing."""
    from actckpt.te import registration

    registration.ignore()
    registration.await_te()
    yield
    registration.ignore()
    registration.await_te()


@pytest.fixture(scope="session")
def expected(loaded: Any) -> Callable[[Setting], dict[str, Any]]:
    """Return the results of plain training, computed once per setting."""
    from te_on_cpu.training import train

    known: dict[Setting, dict[str, Any]] = {}

    def of(setting: Setting) -> dict[str, Any]:
        if setting not in known:
            known[setting] = train(loaded, setting)
        return known[setting]

    return of
