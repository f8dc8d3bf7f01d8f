"""Random programs in regions that decide candidates after every kept value (NOTE [ Candidates ])."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from replay_programs import difference, drawn_programs

import actckpt
from actckpt import _C, _bind


@pytest.fixture(params=["off", "always"])
def _decided_at_once(request: Any) -> Iterator[None]:
    """By default values as small as these wait for their region to close."""
    actckpt.configure(audit=request.param)
    _C.connect(_bind.NAMES | {"least_growth_bytes": 0})
    yield
    _C.connect(_bind.NAMES)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("_decided_at_once")
@drawn_programs
def test_random_programs_are_bit_equal_to_plain_autograd(
    program: list[Any], flags: tuple[bool, ...], mode: int, seed: int
) -> None:
    found = difference(program, flags, mode, seed)
    assert found is None, found
