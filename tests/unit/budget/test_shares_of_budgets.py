"""What one forward may use of a budget in training."""

import pickle
import re
from dataclasses import replace

import pytest

from actckpt import PlanInfeasibleError
from actckpt._budget.shares import Share

_SHARES = [
    Share(1000.0, 0.0, 1, has_reserve=True),
    Share(1000.0, 100.0, 1, has_reserve=False),
    Share(12_345_678.0, 1_234_567.0, 4, has_reserve=True),
    Share(12_345_678.0, 0.0, 7, has_reserve=True),
]


@pytest.mark.parametrize("share", _SHARES)
def test_shares_and_what_is_fixed_make_up_the_budget(share: Share) -> None:
    used = share.fixed_bytes + share.num_alive * (share.nbytes - share.fixed_bytes)
    left = share.given_bytes - used
    assert left == pytest.approx(0.02 * (share.given_bytes - share.fixed_bytes) if share.has_reserve else 0.0)


@pytest.mark.parametrize("share", _SHARES)
def test_the_smallest_budget_that_an_error_names_is_enough_and_no_byte_too_much(share: Share) -> None:
    needed = 2 * share.nbytes + 17
    error = share.infeasible(PlanInfeasibleError("No plan fits.", needed, "What holds it: its working set"))
    assert error.smallest_bytes is not None
    assert f"({error.smallest_bytes} bytes)" in str(error)
    assert "What holds it: its working set. Pass that budget" in str(error)
    assert (f"{share.num_alive} were alive" in str(error)) == (share.num_alive > 1)
    assert replace(share, given_bytes=error.smallest_bytes).nbytes >= needed
    assert replace(share, given_bytes=error.smallest_bytes - 3).nbytes < needed
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.smallest_bytes, again.holds) == (str(error), error.smallest_bytes, error.holds)


def test_a_part_of_a_byte_is_nothing_and_errors_name_what_was_written() -> None:
    share = Share(1.0, 0.0, 2, has_reserve=True, given="activation_budget=1")
    assert share.nbytes == 0.0
    error = share.infeasible(PlanInfeasibleError("No plan fits.", 1000.0, "What holds it: its working set"))
    expected = (
        rf"No plan fits into 1 B \(activation_budget=1\): the smallest budget is .* \({error.smallest_bytes} bytes\)"
    )
    assert re.match(expected, str(error))


def test_an_error_for_any_budget_stays_as_it_is() -> None:
    error = PlanInfeasibleError("No plan fits, whatever the budget.", None)
    assert _SHARES[0].infeasible(error) is error
