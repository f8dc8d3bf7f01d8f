"""What a rank raises reaches the report, and what does not end is told with its stacks."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError, Ranks


def _sum(value: float) -> float:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return float(tensor)


def _fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("one went wrong")
    _sum(0.0)  # waits for the other one


def _hang() -> None:
    time.sleep(60)


def test_what_one_rank_raises_is_told_although_the_other_waits_for_it(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0: still runs.*_sum.*rank 1: raised.*one went wrong"):
        ranks.run(_fail_on_one_rank)
    assert time.monotonic() - began < 30
    assert ranks.run(_sum, 2.0) == [5.0, 5.0]  # in other processes


def test_what_does_not_end_fails_with_the_stacks_of_both_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankError) as told:
        ranks.run(_hang, timeout_s=5)
    assert len(re.findall(r"still runs\n.*?in _hang", str(told.value), re.DOTALL)) == 2
