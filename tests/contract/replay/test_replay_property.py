"""Random programs under random policies: replay gives what autograd saved, bit by bit, or says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st
from random_programs import many_draws
from replay_operators import OPERATORS
from replay_programs import POLICIES, difference

import actckpt
from actckpt import _C, _bind

numbers = st.integers(0, 9)
names = st.sampled_from(sorted(OPERATORS))
writes = st.sampled_from(sorted(name for name in OPERATORS if name.endswith("_") or "place" in name or "of" in name))
operators = st.tuples(names | writes, numbers, numbers, numbers)
extras = st.tuples(st.sampled_from(["drop", "grad", "checkpoint"]), numbers, numbers, numbers)
policies = st.tuples(st.sampled_from(POLICIES), st.integers(0, 50))


def _around(inner: Any) -> Any:
    items = operators | extras | st.tuples(st.just("region"), policies, inner) | st.tuples(st.just("no grad"), inner)
    return st.lists(items, min_size=1, max_size=8)


bodies = st.recursive(st.lists(operators | extras, min_size=1, max_size=8), _around, max_leaves=4)
programs = st.lists(operators | st.tuples(st.just("region"), policies, bodies), min_size=1, max_size=6)


@pytest.fixture(params=["off", "always"])
def _audited(request: Any) -> None:
    actckpt.configure(audit=request.param)


@pytest.fixture(params=[True, False], ids=["decided at once", "decided at the end"])
def _decided(request: Any) -> Iterator[None]:
    """Decide which values are kept after each new one; by default small ones wait for their region to close."""
    _C.connect(_bind.NAMES | ({"least_growth_bytes": 0} if request.param else {}))
    yield
    _C.connect(_bind.NAMES)


@pytest.mark.filterwarnings(r"ignore:Use of \w+ on expanded tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.filterwarnings("ignore:.*backwards ran inside of one region:UserWarning")
@pytest.mark.filterwarnings("ignore:A region ran none of the places:UserWarning")
@pytest.mark.usefixtures("_audited", "_decided")
@many_draws
@given(
    program=programs.filter(lambda program: any(kind == "region" for kind, *_ in program)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    mode=st.integers(0, 4),
    seed=st.integers(0, 3),
)
def test_random_programs_are_bit_equal_to_plain_autograd(
    program: list[Any], flags: tuple[bool, ...], mode: int, seed: int
) -> None:
    found = difference(program, flags, mode, seed)
    assert found is None, found


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda value: value.mul_(1.5), id="bytes that change"),
        pytest.param(lambda value: value.neg_(), id="a sign that is lost"),
    ],
)
def test_the_comparison_notices_wrong_bytes(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import replay_programs

    right = replay_programs.outcome

    def wrong(program: Any, flags: Any, mode: int, seed: int, region: Any) -> Any:
        found = right(program, flags, mode, seed, region)
        if region is actckpt.region:
            spoil(found[1][0][0])
        return found

    monkeypatch.setattr(replay_programs, "outcome", wrong)
    program = [("region", ("recompute", 0), [("sin", 0, 0, 0), ("multiply", 3, 0, 0)])]
    assert "differ" in str(difference(program, (True, True, True), 0, 0))
