"""`actckpt.te.wrap`: policies per module of TransformerEngine, on fakes (te_fakes.py)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, leaf
from te_fakes import VERSIONS, ByteTracker, FakeTracker
from te_oracle import RECIPES, assert_trains_as_plain, make_model, plain

import actckpt
from actckpt.errors import BlocksError

POLICIES = {
    "recompute": "recompute",
    "offload": "offload",
    "keep": "keep",
    "by name": {"self_attention": "offload", "layernorm_mlp": "recompute"},
    "by the name of a type": {"MultiheadAttention": "recompute", "LayerNormMLP": "keep"},
    "wildcards and inner modules": {"*.core_attention": "recompute", "1.layernorm_mlp.fc1": "offload"},
    "keep inside offload": {"TransformerLayer": "offload", "core_attention": "keep"},
    "recompute inside offload": {"TransformerLayer": "offload", "layernorm_mlp": "recompute"},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_gradients_and_states_of_plain_training(version: str, recipe: str, policy: str) -> None:
    wrap = lambda model: actckpt.te.wrap(model, POLICIES[policy], min_bytes=0)  # noqa: E731
    assert_trains_as_plain(version, plain, RECIPES[recipe], tracker=FakeTracker, prepare=wrap)


def test_a_tracker_that_only_its_getter_knows_is_restored(te: Any) -> None:
    def run(wrapped: bool) -> list[Any]:
        model, get_tracker = make_model(te, tracker=ByteTracker)
        te.distributed.active_states = {}  # as Megatron's own tracker, of which TransformerEngine knows nothing
        if wrapped:
            actckpt.te.wrap(model, get_rng_state_tracker=get_tracker)
        x = leaf(2, 4, 8)
        h = x
        for layer in model:
            h = layer(h)
        h.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    torch.manual_seed(1)
    expected = run(False)
    torch.manual_seed(1)
    assert_equal(run(True), expected)


class Mixed(torch.nn.Module):
    """Plain modules around, between and of the same name as fakes."""

    def __init__(self, te: Any) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.layers = torch.nn.ModuleList([te.TransformerLayer(8), torch.nn.Linear(8, 8), te.Linear(8)])
        self.self_attention = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.self_attention(x)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_models_that_mix_plain_modules_with_fakes(te: Any, retain_graph: bool) -> None:
    def run(wrapped: bool) -> list[Any]:
        torch.manual_seed(1)
        model, x = Mixed(te), leaf(2, 4, 8)
        keys = list(model.state_dict())
        if wrapped:
            assert actckpt.te.wrap(model, retain_graph=retain_graph) is model
            wrapped_names = [name for name, part in model.named_modules() if "forward" in part.__dict__]
            assert wrapped_names == ["layers.0", "layers.2"]
            assert list(model.state_dict()) == keys
        model(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_equal(run(True), run(False))


def test_hooks_of_wrapped_modules_run_once_per_call(te: Any) -> None:
    layer, calls = te.Linear(), Log()
    layer.register_forward_hook(lambda *_: calls.append(1))
    actckpt.te.wrap(layer)
    layer(leaf(4, 8)).sum().backward()
    assert len(calls) == 1


def test_unwrap_copies_and_forwards_that_instances_had(te: Any) -> None:
    layer, calls = te.Linear(), Log()
    own = layer.forward
    layer.forward = lambda x: calls.append(1) or own(x)
    actckpt.te.wrap(layer)
    layer(leaf(4, 8)).sum().backward()
    assert len(calls) == 2
    twin = copy.deepcopy(actckpt.te.wrap(te.Linear()))
    assert twin.forward.module is twin
    assert actckpt.te.unwrap(layer) is layer
    layer(leaf(4, 8)).sum().backward()
    assert len(calls) == 3
    with pytest.raises(BlocksError, match="nothing in Linear"):
        actckpt.te.unwrap(layer)


def test_what_cannot_be_wrapped_says_why(te: Any) -> None:
    layer = te.TransformerLayer()
    for policy in ("save", {"self_attention": "drop"}):
        with pytest.raises(ValueError, match="'keep', 'recompute', 'offload'"):
            actckpt.te.wrap(layer, policy)
    with pytest.raises(ValueError, match="empty"):
        actckpt.te.wrap(layer, {})
    with pytest.raises(BlocksError, match="Nearest: self_attention"):
        actckpt.te.wrap(layer, {"self_atention": "offload"})
    with pytest.raises(BlocksError, match="of type"):
        actckpt.te.wrap(layer, {torch.nn.Conv2d: "offload"})
    with pytest.raises(ValueError, match=r"'self_attention.proj' \(keep\) is inside 'self_attention'"):
        actckpt.te.wrap(layer, {"self_attention": "recompute", "proj": "keep"})
    with pytest.raises(ValueError, match="one backward only"):
        actckpt.te.wrap(layer, {"self_attention": "keep"}, retain_graph=True)
    with pytest.raises(BlocksError, match=r"actckpt\.apply"):
        actckpt.te.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    actckpt.te.wrap(layer, {torch.nn.Module: "offload"})
    with pytest.raises(BlocksError, match="wrapped already"):
        actckpt.te.wrap(layer)
    assert len([part for part in layer.modules() if "forward" in part.__dict__]) == len(list(layer.modules()))


def test_without_grad_mode_nothing_is_held(te: Any) -> None:
    layer = actckpt.te.wrap(te.Linear(), retain_graph=True)
    with torch.no_grad():
        assert not layer(leaf(4, 8)).requires_grad
    layer.requires_grad_(False)
    assert not layer(torch.randn(4, 8)).requires_grad


def test_item_21_the_policy_acts_per_module_and_per_saved_tensor(te: Any) -> None:
    layer = te.TransformerLayer()
    actckpt.te.wrap(layer, {"self_attention": "offload", "layernorm_mlp": "recompute"}, min_bytes=4 * 64)
    runs: list[str] = []
    for name, part in layer.named_modules():
        part.register_forward_hook(lambda *_, name=name: runs.append(name))
    actckpt.reset_stats()
    layer(leaf(2, 4, 8)).sum().backward()
    stats = actckpt.stats()
    assert runs.count("layernorm_mlp.fc1") == 2 and runs.count("self_attention.proj") == 1
    assert stats.offloaded_bytes > 0 and stats.rerun_regions == 1
    moved = stats.offloaded_bytes
    actckpt.te.wrap(actckpt.te.unwrap(layer), {"self_attention": "offload"}, min_bytes=1 << 20)
    actckpt.reset_stats()
    layer(leaf(2, 4, 8)).sum().backward()
    assert actckpt.stats().offloaded_bytes == 0 < moved
