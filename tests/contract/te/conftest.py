"""TransformerEngine, a fake."""

from collections.abc import Iterator
from typing import Any

import pytest
from te_fakes import VERSIONS, installed


@pytest.fixture
def te(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Have the newest version loaded, or the one that a test names."""
    with installed(getattr(request, "param", VERSIONS[-1])) as found:
        yield found
