"""Models train on the simulated device as on the CPU, bit for bit, through everything of torch that trains."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(F.layer_norm(hidden, (32,)))


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


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b)) and len(a) == len(b)


@pytest.mark.parametrize(
    ("dropout", "optimizer", "options"),
    [
        (0.0, torch.optim.AdamW, {"foreach": False}),
        (0.0, torch.optim.AdamW, {"fused": True}),
        (0.1, torch.optim.AdamW, {"foreach": True}),
        (0.5, torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    ],
)
def test_a_transformer_trains_as_on_the_cpu(dropout: float, optimizer: Any, options: dict[str, Any]) -> None:
    model = Model(dropout)
    assert _same(_trained(model, "cpu", optimizer, **options), _trained(model, "sim", optimizer, **options))


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
    assert set(seen) == {"sim:0", "sim:1"}
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
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first.cpu())


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
    assert _same(_drawn("cpu"), found)


def test_autocast_has_the_lists_of_accelerators() -> None:
    values = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (values @ values).dtype == torch.bfloat16
        assert values.bfloat16().softmax(0).dtype == torch.float32
        assert torch.is_autocast_enabled("sim") and not torch.is_autocast_enabled("cpu")
    scaler = torch.amp.GradScaler("sim")
    model = nn.Linear(3, 3).to("sim")
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("sim", dtype=torch.float16):
        found = model(torch.ones(2, 3, device="sim"))
    scaler.scale(found.float().sum()).backward()
    scaler.step(steps)
    assert found.dtype == torch.float16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(1)
    layer, values = kind(6, 8, num_layers=2), torch.randn(5, 3, 6)
    found = []
    for where in ("cpu", "sim"):
        own = copy.deepcopy(layer).to(where)
        own(values.to(where))[0].square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in own.parameters() if parameter.grad is not None])
    assert len(found[0]) == 8
    torch.testing.assert_close(found[0], found[1])
