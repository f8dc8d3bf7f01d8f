"""Random programs under random policies: replay gives what autograd saved, bit by bit, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from replay_programs import difference, drawn_programs

import actckpt


@pytest.fixture(params=["off", "always"])
def _audited(request: Any) -> None:
    actckpt.configure(audit=request.param)


@pytest.mark.filterwarnings(r"ignore:Use of \w+ on expanded tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.filterwarnings("ignore:.*backwards ran inside of one region:UserWarning")
@pytest.mark.filterwarnings("ignore:A region ran none of the places:UserWarning")
@pytest.mark.usefixtures("_audited")
@drawn_programs
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
