"""What counts all the time is counted again where it may have changed, and not in each forward."""

from __future__ import annotations

import torch

from actckpt._budget.meters import FixedBytes, Meter


def test_changes_are_seen_and_nothing_is_counted_in_between() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    walks = []

    def walk() -> Meter:
        walks.append(1)
        return Meter(model, (optimizer,), total=True)

    own_bytes = float(sum(parameter.nbytes for parameter in model.parameters()))
    fixed = FixedBytes(model, (optimizer,), own_bytes)

    def now(*, num_walks: int) -> float:
        walks.clear()
        found = {fixed.now(walk) for _ in range(10)}
        assert len(walks) == num_walks and found == {Meter(model, (optimizer,), total=True).fixed_bytes}
        return found.pop()

    assert now(num_walks=0) == own_bytes
    model(torch.ones(2, 8)).sum().backward()
    assert now(num_walks=1) == 2 * own_bytes
    optimizer.step()
    steps_bytes = 4 * 8
    assert now(num_walks=1) == 4 * own_bytes + steps_bytes
    model[0].weight.grad = None
    assert now(num_walks=1) == 4 * own_bytes + steps_bytes - model[0].weight.nbytes
    before = now(num_walks=0)
    model[0].register_buffer("more", torch.zeros(8))
    assert now(num_walks=1) == before + 32
    model.append(torch.nn.Linear(1, 1, bias=False))  # a module that was not there, seen at one of a hundred
    walks.clear()
    bytes_then = [fixed.now(walk) for _ in range(200)]
    assert len(walks) == 2 and bytes_then[-1] == bytes_then[0] + 4
