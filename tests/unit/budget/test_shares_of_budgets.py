"""What one forward may use of a budget in training."""

import pickle
import re
from dataclasses import replace

import pytest

from actckpt import PlanInfeasibleError
from actckpt._budget.shares import Bounds, Part, Share

_SHARES = [
    Share(1000.0, 0.0, Part.of_alike(1), has_reserve=True),
    Share(1000.0, 100.0, Part.of_alike(1), has_reserve=False),
    Share(12_345_678.0, 1_234_567.0, Part.of_alike(4), has_reserve=True),
    Share(12_345_678.0, 0.0, Part.of_alike(7), has_reserve=True),
    Share(12_345_678.0, 1_234_567.0, Part(Bounds(1e6, 2e6), Bounds(5e6, 2e7), 3), has_reserve=True),
    Share(4_345_678.0, 1_234_567.0, Part(Bounds(1e6, 2e6), Bounds(5e6, 2e7), 3), has_reserve=True),
]


@pytest.mark.parametrize("share", _SHARES)
def test_shares_and_what_is_fixed_make_up_the_budget(share: Share) -> None:
    used = share.fixed_bytes + share.part.whole(share.nbytes - share.fixed_bytes)
    left = share.given_bytes - used
    assert left == pytest.approx(0.02 * (share.given_bytes - share.fixed_bytes) if share.has_reserve else 0.0)


@pytest.mark.parametrize("share", _SHARES)
def test_the_smallest_budget_that_an_error_names_is_enough_and_no_byte_too_much(share: Share) -> None:
    needed = 2 * share.nbytes + 17
    error = share.infeasible(PlanInfeasibleError("No plan fits.", needed, "What holds it: its working set"))
    assert error.smallest_bytes is not None
    assert f"({error.smallest_bytes} bytes)" in str(error)
    assert "What holds it: its working set. Pass that budget" in str(error)
    words = f"{share.part.num} were alive" if share.part.is_of_alike else f"other sizes, {share.part.num} in all"
    assert (words in str(error)) == (share.part.num > 1)
    assert replace(share, given_bytes=error.smallest_bytes).nbytes >= needed
    assert replace(share, given_bytes=error.smallest_bytes - 3).nbytes < needed
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.smallest_bytes, again.holds) == (str(error), error.smallest_bytes, error.holds)


def test_a_part_of_a_byte_is_nothing_and_errors_name_what_was_written() -> None:
    share = Share(1.0, 0.0, Part.of_alike(2), has_reserve=True, given="activation_budget=1")
    assert share.nbytes == 0.0
    error = share.infeasible(PlanInfeasibleError("No plan fits.", 1000.0, "What holds it: its working set"))
    expected = (
        rf"No plan fits into 1 B \(activation_budget=1\): the smallest budget is .* \({error.smallest_bytes} bytes\)"
    )
    assert re.match(expected, str(error))


@pytest.mark.parametrize("given", [1e5, 3e6, 7e6, 1e7, 5e7])
def test_parts_of_forwards_of_several_sizes_make_up_what_is_given(given: float) -> None:
    bounds, nums = [Bounds(1e6, 2e6), Bounds(5e5, 4e6), Bounds(3e5, 3.1e5)], [2, 1, 3]
    least = sum(num * each.least for num, each in zip(nums, bounds, strict=True))
    plain = sum(num * each.plain for num, each in zip(nums, bounds, strict=True))
    parts = [Part(own, Bounds(least, plain), sum(nums)) for own in bounds]
    got = [part.of(given) for part in parts]
    assert sum(num * nbytes for num, nbytes in zip(nums, got, strict=True)) == pytest.approx(given)
    for part, nbytes in zip(parts, got, strict=True):
        assert part.whole(nbytes) == pytest.approx(given)
        assert (nbytes >= part.own.least) == (given >= least) and (nbytes >= part.own.plain) == (given >= plain)


def test_an_error_for_any_budget_stays_as_it_is() -> None:
    error = PlanInfeasibleError("No plan fits, whatever the budget.", None)
    assert _SHARES[0].infeasible(error) is error
