"""Random programs in regions that decide candidates after every kept value (NOTE [ Candidates ])."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
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


@pytest.mark.usefixtures("_decided_at_once")
def test_a_candidate_whose_graph_is_gone_is_released_while_its_region_is_open() -> None:
    left, right = (torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with actckpt.region("matmuls"):
        product = left @ right
        value = product[:16].float()  # smaller than the product
        sine = value.sin()  # saves it
        storage = weakref.ref(value.untyped_storage())
        del value, sine
        other = (left @ right).float().exp()
        assert storage() is None
    other.sum().backward()
