"""What hides no mistake of the program: copies are late, freed memory is used at once, and numbers are the CPU's."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sim import device
from torch import Tensor, nn

VALUES = torch.arange(100.0)


def _late(side: torch.Stream) -> tuple[Tensor, Tensor]:
    """Return a device tensor, and a pinned one that `side` has yet to copy it to."""
    source, host = VALUES.to("sim"), torch.zeros(100, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(source, non_blocking=True)
    source.record_stream(side)
    return source, host


def test_copies_are_late_and_a_wait_blocks_nothing_but_its_stream() -> None:
    side, third = torch.Stream(device="sim"), torch.Stream(device="sim")
    source, _ = _late(side)
    source * 2
    torch.accelerator.current_stream().synchronize()
    assert device.num_pending() == 1
    third.wait_stream(side)
    assert device.num_pending() == 2
    with third:
        torch.ones(4, device="sim")  # a kernel behind the wait
    assert device.num_pending() == 0


def test_an_event_is_what_its_stream_had_and_a_query_takes_a_step() -> None:
    side = torch.Stream(device="sim")
    _, first = _late(side)
    event = side.record_event()
    _late(side)
    assert not event.query() and event.query()
    event.synchronize()
    assert torch.equal(first, VALUES) and device.num_pending() == 1


def test_an_adversary_runs_copies_early_and_the_same_each_time() -> None:
    def pending() -> list[int]:
        device.settle()
        device.set_adversary(3, 0.1)
        kind, counts = torch.accelerator.current_stream().device_type, []
        for number in range(12):
            _late(torch.Stream(stream_id=1 + number % 4, device_index=0, device_type=kind))
            counts.append(device.num_pending())
        return counts

    first = pending()
    assert first == pending() and len(set(first)) > 3


def test_memory_is_poisoned_and_goes_to_the_next_tensor_once_its_recorded_uses_have_passed() -> None:
    def address_of_the_next() -> int:
        fresh = torch.empty(100, device="sim")
        assert fresh.isnan().all()
        return fresh.data_ptr()

    address, side = address_of_the_next(), torch.Stream(device="sim")
    assert address_of_the_next() == address
    with side:
        assert address_of_the_next() != address
    source, _ = _late(side)
    address = source.data_ptr()
    del source
    assert address_of_the_next() != address
    side.synchronize()
    assert address_of_the_next() == address


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True) for _ in range(2))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(F.layer_norm(self.blocks(self.embed(tokens)), (32,)))


def _trained(model: nn.Module, where: str, optimizer: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(5)
    own = copy.deepcopy(model).to(where)
    steps = optimizer(own.parameters(), lr=1e-2, **options)
    tokens = torch.arange(48).view(3, 16) % 50
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(own(tokens.to(where)).flatten(0, 1), tokens.roll(1).flatten().to(where))
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        steps.step()
        losses.append(loss.detach().cpu())
    return losses + [value.cpu() for p in own.parameters() for value in (p.detach(), p.grad)]


@pytest.mark.parametrize(
    ("dropout", "optimizer", "options"),
    [
        (0.0, torch.optim.AdamW, {"fused": True}),
        (0.1, torch.optim.AdamW, {"foreach": True}),
        (0.5, torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    ],
)
def test_a_transformer_trains_as_on_the_cpu(dropout: float, optimizer: Any, options: dict[str, Any]) -> None:
    model = Model(dropout)
    expected, found = (_trained(model, where, optimizer, **options) for where in ("cpu", "sim"))
    assert all(map(torch.equal, expected, found))


def test_backward_runs_in_a_thread_of_its_device() -> None:
    seen: dict[str, tuple[int, int]] = {}

    def note(gradient: Tensor) -> None:
        seen[str(gradient.device)] = (threading.get_native_id(), torch.sim.current_device())

    first = torch.randn(3, device="sim:0", requires_grad=True)
    middle = first * 2
    second = middle.to("sim:1") * 3
    middle.register_hook(note)
    second.register_hook(note)
    second.sum().backward()
    threads = {thread for thread, _ in seen.values()} | {threading.get_native_id()}
    assert len(threads) == 3 and seen["sim:1"][1] == 1
    assert first.grad is not None and first.grad.tolist() == [6, 6, 6]


def test_generators_are_one_per_device_and_leave_the_cpus_alone() -> None:
    before = torch.get_rng_state()
    torch.sim.manual_seed_all(7)
    state = torch.sim.get_rng_state("sim:1")
    first = torch.rand(3, device="sim:1")
    torch.rand(3, device="sim:0")
    torch.sim.set_rng_state(state, "sim:1")
    assert torch.equal(first, torch.rand(3, device="sim:1"))
    own = torch.Generator(device="sim:1").manual_seed(7)
    assert torch.equal(first, torch.rand(3, device="sim:1", generator=own))
    assert torch.equal(before, torch.get_rng_state())


def _drawn(where: str) -> list[Tensor]:
    torch.manual_seed(7)
    ones = torch.ones(9, device=where)
    drawn = [torch.randn(5, device=where), torch.randint(9, (5,), device=where), torch.randperm(9, device=where)]
    drawn += [torch.empty(5, device=where).normal_(), ones.bernoulli(0.5), torch.multinomial(ones, 3)]
    drawn += [torch.rand_like(ones), torch.rand(5, out=torch.empty(5, device=where)), F.dropout(ones, 0.3)]
    drawn += [torch.native_dropout(ones, 0.3, True)[0], F.alpha_dropout(ones, 0.5, True)]
    return [value.cpu() for value in drawn]


def test_every_way_to_draw_numbers_draws_from_the_device() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = _drawn("sim")
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, _drawn("cpu"), found))


def test_autocast_has_the_lists_of_accelerators() -> None:
    values = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (values @ values).dtype == torch.bfloat16
        assert values.bfloat16().softmax(0).dtype == torch.float32
        assert torch.is_autocast_enabled("sim") and not torch.is_autocast_enabled("cpu")
