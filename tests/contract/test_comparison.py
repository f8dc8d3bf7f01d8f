"""`compare`: what it measures is so, and it leaves everything as it found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt.memory import LiveStorages


class Model(nn.Module):
    """Blocks with dropout between them, and a buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1)
        return self.norm(x.flatten(0, 1)).square().mean()


@pytest.fixture(name="model")
def _model() -> nn.Module:
    return Model()


def _x() -> Tensor:
    return torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32)


def test_every_policy_has_a_row_and_the_bits_of_plain_training(model: nn.Module) -> None:
    policies = {
        "rerun": "recompute",
        "sin": [torch.ops.aten.mm, torch.ops.aten.addmm],
        "inputs": {"policy": "recompute", "offload_inputs": True},
    }
    found = actckpt.compare(lambda: model(_x()).backward(), model=model, policies=policies, rounds=2)
    assert [row.name for row in found.rows] == ["none", *policies]
    assert all(row.same_bits for row in found.rows)
    assert [row.blocks for row in found.rows] == [0, 4, 4, 4]
    assert found["none"].ratio == 1
    assert found["rerun"].held_bytes < 0.5 * found["none"].held_bytes
    assert found["rerun"].peak_bytes < found["none"].peak_bytes
    assert "rerun" in str(found)
    assert found.as_dict()["rounds"] == 2


def test_held_bytes_and_peak_are_those_of_a_step_by_hand(model: nn.Module) -> None:
    found = actckpt.compare(lambda: model(_x()).backward(), model=model, policies={"rerun": "recompute"}, rounds=1)
    for row in found.rows:
        if row.name == "rerun":
            actckpt.apply(model)
        with LiveStorages(parameters=model.parameters()) as live:
            loss = model(_x())
            held = live.live_bytes
            loss.backward()
        assert (row.held_bytes, row.peak_bytes) == (held, live.peak_bytes)
        model.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_gradients_that_differ_are_shown(model: nn.Module) -> None:
    """A step that asks whether its model is checkpointed gives other gradients there."""

    def step() -> None:
        is_applied = any("forward" in module.__dict__ for module in model.modules())
        (model(_x()) * (2 if is_applied else 1)).backward()

    found = actckpt.compare(step, model=model, policies={"rerun": "recompute"}, rounds=1)
    assert found["none"].same_bits and not found["rerun"].same_bits
    assert "DIFFER" in found.table()


@pytest.mark.parametrize("runs", [False, True])
def test_a_step_without_backward_is_refused_beside_an_optimizer_too(model: nn.Module, runs: bool) -> None:
    optimizer = _sgd(model)
    model(_x()).backward()  # gradients of another step are none of this one

    def step() -> None:
        model(_x())
        if runs:
            optimizer.zero_grad()
            optimizer.step()

    with pytest.raises(ValueError, match=r"^compare: the step left no gradients.*runs forward and backward"):
        actckpt.compare(step, model=model, optimizer=optimizer, policies={}, rounds=1)


@pytest.mark.parametrize(("min_bytes", "words"), [(2**20, "Nothing was offloaded: all "), (8192, "and stay"), (0, "")])
def test_a_policy_that_moves_nothing_says_so(model: nn.Module, min_bytes: int, words: str) -> None:
    policies = {"off": {"policy": "offload", "min_bytes": min_bytes}}
    found = actckpt.compare(lambda: model(_x()).backward(), model=model, policies=policies, rounds=1)
    assert found["none"].note == "" and words in found["off"].note and bool(words) == bool(found["off"].note)
    assert (f"\noff: {found['off'].note}" in found.table()) == bool(words)


@pytest.mark.filterwarnings("ignore:apply. the blocks ran none of the places")
def test_a_table_of_places_is_a_policy_like_others_also_where_names_are_like_options(model: nn.Module) -> None:
    policies = {"options": {"block": "keep", "debug": "keep"}, "places": {"layers.**::aten.addmm": "keep"}}
    found = actckpt.compare(lambda: model(_x()).backward(), model=model, policies=policies, rounds=1)
    assert all(found[name].same_bits and found[name].blocks == 4 for name in policies)


def test_gradients_of_sparse_embeddings_are_compared_and_put_back() -> None:
    embedding = nn.Embedding(8, 32, sparse=True)
    model = nn.Sequential(embedding, *(Block(32) for _ in range(3)))
    tokens = torch.tensor([[1, 2, 2]])

    def step() -> None:
        model(tokens).sum().backward()

    step()
    before = embedding.weight.grad.to_dense()
    found = actckpt.compare(step, model=model, rounds=1)
    assert all(row.same_bits for row in found.rows)
    assert torch.equal(embedding.weight.grad.to_dense(), before)


def test_a_plan_and_a_budget_have_rows_of_their_own_also_with_an_optimizer(model: nn.Module) -> None:
    optimizer = _sgd(model)

    def step() -> None:
        model(_x()).backward()
        optimizer.step()
        optimizer.zero_grad()  # a step that leaves no gradients has a backward, too

    plan = actckpt.plan(step, model=model, optimizer=optimizer, activation_budget="80%", race=False)
    policies = {"plan": plan, "80 %": {"activation_budget": "80%", "race": False}, "all": {"budget": "1GiB"}}
    found = actckpt.compare(step, model=model, optimizer=optimizer, policies=policies, rounds=1)
    assert [row.name for row in found.rows] == ["none", *policies]
    assert all(row.same_bits for row in found.rows)
    none, planned, budgeted, everything = (row.peak_bytes for row in found.rows)
    assert everything == none
    assert max(planned, budgeted) < 0.9 * none  # shares are of what was predicted of none
    assert min(planned, budgeted) > none / 4
    with pytest.raises(actckpt.errors.BlocksError):
        actckpt.remove(model)


def test_a_budget_is_timed_as_apply_runs_it_once_its_trials_are_over(model: nn.Module) -> None:
    is_watched: list[bool] = []

    def step() -> None:
        is_watched.append(bool(model._forward_pre_hooks))
        model(_x()).backward()

    found = actckpt.compare(step, model=model, policies={"80 %": {"activation_budget": "80%"}}, rounds=3)
    num_settling = len(is_watched) - 2 * (2 + 3)  # both rows: a first step, one for memory, three rounds
    assert num_settling >= 2 and all(is_watched[:num_settling])  # measured and fitted, at least
    assert is_watched[num_settling:] == [False, False, True, True, *(3 * [False, True])]
    assert found["80 %"].same_bits and not model._forward_pre_hooks


def test_a_step_that_says_its_samples_or_tokens_has_their_rate(model: nn.Module) -> None:
    def compared(**options: Any) -> actckpt.Comparison:
        return actckpt.compare(lambda: model(_x()).backward(), model=model, policies={}, rounds=1, **options)

    row = compared(samples=2, tokens=32).rows[0]
    assert (row.samples_per_s, row.tokens_per_s) == (2 / row.seconds, 32 / row.seconds)
    heads = [compared(**given).table().splitlines()[0] for given in ({}, {"samples": 2}, {"samples": 2, "tokens": 32})]
    assert [("samples/s" in head, "tokens/s" in head) for head in heads] == [(False,) * 2, (True, False), (True,) * 2]
    with pytest.raises(ValueError, match=r"^compare: tokens=0\. Pass a whole number from 1 on: of one step\.$"):
        compared(tokens=0)


_MM = torch.ops.aten.mm


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["recompute", "matmuls"], r"a list\. .*policies=\{'recompute': 'recompute', 'matmuls': 'matmuls'\}\.$"),
        ([_MM, "aten.bmm"], r"a list\. .*policies=\{'keep these': \[aten\.mm, aten\.bmm\]\}\.$"),
        ("matmuls", r"a str\. .*policies=\{'matmuls': 'matmuls'\}\.$"),
        (lambda info: "keep", r"a function\. .*policies=\{'mine': policy\}\.$"),
        ({_MM: "keep"}, r"the key .*aten\.mm.* goes by a name, too: policies=\{'mine': \{\.\.\.\}\}\.$"),
        ({1: "recompute"}, r"the key 1 \(int\), and keys are names"),
        ({" ": "recompute"}, r"the key ' ' \(str\), and keys are names"),
        ({"none": "recompute"}, r"policies\['none'\] is 'recompute', but this is the name of the step without"),
        ({"mine": "full"}, r"policies\['mine'\]: policy='full' is not an action\. .* Did you mean 'recompute'\?$"),
        ({"mine": "40%"}, r"policies\['mine'\]: policy='40%' is a budget\. Pass activation_budget='40%' in"),
        ({"mine": {"budget": "1GiB", "optimiser": 1}}, r"policies\['mine'\]: unknown option optimiser .*optimizer\?"),
        ({"mine": {"budgt": "1GiB"}}, r"policies\['mine'\]: unknown option 'budgt'\. Did you mean budget\? Known: "),
        ({"mine": {"Budget": "1GiB"}}, r"unknown option 'Budget'\. Did you mean budget\? Known: "),
        ({"mine": {"polcy": "keep"}}, r"unknown option 'polcy'\. Did you mean policy\? Known: "),
        ({"mine": {"min_byte": 1}}, r"unknown option 'min_byte'\. Did you mean min_bytes\? Known: "),
        ({"mine": {"race": False}}, r"'race' is an option, and there is no policy and no budget beside it\. Pass one"),
        ({"ok": "recompute", "mine": {"policy": 3}}, r"policies\['mine'\]: policy=3 is a int"),
    ],
)
def test_policies_that_are_none_are_one_clear_error_before_anything_runs(
    model: nn.Module, policies: Any, message: str
) -> None:
    def step() -> None:
        pytest.fail("the step ran")

    for who in (actckpt.compare, actckpt.estimate):
        with pytest.raises(ValueError, match=rf"^{who.__name__}: .*{message}") as raised:
            who(step, model=model, policies=policies)
        assert "\n" not in str(raised.value)


def test_a_comparison_is_drawn(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = actckpt.compare(lambda: model(_x()).backward(), model=model, rounds=1)
    found.plot(tmp_path / "found.svg")
    assert "recompute" in (tmp_path / "found.svg").read_text()
