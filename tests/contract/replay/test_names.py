"""Names that programs give to values: what policies do with them, and that they change nothing else."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_oracle import TwoTensor
from oracle import CountOperators, assert_equal, leaf, no_collector
from torch import Tensor, nn

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages
from actckpt.policies import save_and_offload_only_these_names, save_only_these_names


class Attention(nn.Module):
    """Attention with names: of a result that is cut into views, of an input, and of what is written to in place."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = actckpt.name(x, "x")
        q, k, v = actckpt.name(self.qkv(x), "qkv").chunk(3, dim=-1)
        actckpt.name(q, "queries")
        weights = actckpt.name((q @ k.mT).softmax(-1), "weights")
        mixed = actckpt.name(weights @ v, "mixed")
        mixed = actckpt.name(mixed.tanh_(), "mixed")
        return x + actckpt.name(self.out(mixed), "out").relu_()


def _model() -> nn.Module:
    return nn.Sequential(*(Attention() for _ in range(3)))


def _gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Any]:
    model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = run(x * 1.5).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def _named(policy: Any, run: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return what the report says of named values."""
    x = leaf(4, 8) * 2
    with actckpt.region(policy) as region:
        y = run(x)
    y.sum().backward()
    return [value for value in region.report().values if value.names]


def _becomes(policy: Any, run: Callable[[Tensor], Tensor]) -> dict[tuple[str, ...], str]:
    return {value.names: value.action.value for value in _named(policy, run)}


def test_it_returns_the_very_tensor_and_runs_nothing() -> None:
    x = leaf(3)
    y = x * 2
    before = y.grad_fn, y._version
    with CountOperators() as count:
        assert actckpt.name(y, "y") is y
        with actckpt.region():
            assert actckpt.name(y, "y") is y and actckpt.name(x, "x") is x
        with actckpt.region({"y": "keep"}):
            assert actckpt.name(y, "y") is y
    assert count.total == 0
    assert (y.grad_fn, y._version) == before


_POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "keep": "keep",
    "keep a name": {"qkv": "keep"},
    "offload names": {"::weights": "offload", "x": "offload"},
    "drop names": {"**": "keep", "qkv": "recompute", "weights": "recompute"},
    "names of modules": {"**.qkv": "offload", "::mixed": "keep", "out": "keep"},
    "save only": save_only_these_names("qkv", "mixed"),
    "save and offload": save_and_offload_only_these_names(
        names_which_can_be_saved=["weights"], names_which_can_be_offloaded=["x", "out"]
    ),
    "a function": lambda info: "offload" if "qkv" in info.names else "recompute",
    "operators": ["aten.mm"],
}


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES)
@pytest.mark.parametrize("way", ["region", "checkpoint", "apply"])
def test_gradients_with_names_are_those_of_plain_training(policy: Any, way: str) -> None:
    model = _model()
    expected = _gradients(model, model)

    def in_region(x: Tensor) -> Tensor:
        with actckpt.region(policy):
            return model(x)  # type: ignore[no-any-return]

    runs: dict[str, Any] = {"region": in_region, "checkpoint": lambda x: actckpt.checkpoint(model, x, policy=policy)}
    if way == "apply":
        actckpt.apply(model, policy=policy)
        if not callable(policy):
            model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for _ in range(3):
        assert_equal(_gradients(model, runs.get(way, model)), expected)


def test_a_named_result_is_kept_and_the_rest_recomputed() -> None:
    found = _becomes({"weights": "keep"}, Attention())
    assert found == {
        ("x",): "keep",
        ("qkv", "queries"): "recompute",
        ("weights",): "keep",
        ("mixed",): "recompute",
    }
    assert _becomes(save_only_these_names("weights"), Attention()) == found
    assert _becomes({"::weights": "keep"}, Attention()) == found
    assert _becomes({"Attention::weights": "keep"}, Attention()) == found
    both = _named({"1::weights": "keep", "[12]::weights": "offload"}, nn.Sequential(Attention(), Attention()))
    assert [value.action.value for value in both if value.names == ("weights",)] == ["recompute", "offload"]


def test_what_an_operator_saved_itself_before_it_had_a_name_is_not_computed_again() -> None:
    x = leaf(4)
    with actckpt.region({"e": "keep"}) as region:
        y = actckpt.name((x * 2).exp(), "e").sum()
    with CountOperators() as count:
        y.backward()
    assert "aten.exp.default" not in count.counts
    assert [value.action for value in region.report().values if value.names == ("e",)] == [Action.KEEP]
    with actckpt.region(lambda info: "keep" if "e" in info.names else "recompute"):
        y = actckpt.name((x * 2).exp(), "e").sum()
    with CountOperators() as count:
        y.backward()
    assert "aten.exp.default" not in count.counts


def test_a_kept_value_that_autograd_does_not_save_is_what_others_are_replayed_from() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    with actckpt.region(save_only_these_names("product")):
        y = (actckpt.name(x.sin() @ w, "product") + 1).sigmoid().sin().sum()
    with CountOperators() as count:
        y.backward()
    assert count.counts["aten.mm.default"] == 2 and count.counts["aten.sigmoid.default"] == 1


def test_a_name_drops_what_its_place_keeps_but_not_what_was_saved_before() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    with actckpt.region({"**": "keep", "product": "recompute", "e": "recompute"}) as region:
        y = actckpt.name(actckpt.name(x.sin() @ w, "product").sin().exp(), "e").sin().sum()
    with CountOperators() as count:
        y.backward()
    found = {value.names: value for value in region.report().values}
    assert found["product",].action is Action.RECOMPUTE and found["e",].action is Action.KEEP
    assert found["e",].why == "its name says recompute, and it had been saved before it got that name"
    assert count.counts["aten.mm.default"] == 3 and "aten.exp.default" not in count.counts


def test_dropping_by_name_frees_what_was_made_and_holds_nothing_else_once_the_region_is_closed() -> None:
    def held(policy: Any) -> int:
        x = leaf(256, 256)
        with no_collector(), LiveStorages() as live:
            with actckpt.region(policy):
                y = actckpt.name(x * x, "square").sin().mul(2).cos().sum()
            assert y.grad_fn is not None
            return round(live.live_bytes / x.nbytes)

    assert held("recompute") == 0
    assert held({"**": "keep"}) == 2
    assert held({"**": "keep", "square": "recompute"}) == held({"square": "keep"}) == 1


def test_of_entries_that_disagree_the_place_wins_and_then_the_last_one() -> None:
    def run(x: Tensor) -> Tensor:
        one, two = actckpt.name(x * x, "both").chunk(2)
        return (actckpt.name(one, "one").sin() * actckpt.name(two, "two").cos()).sum()

    names = ("both", "one", "two")
    assert _becomes({"one": "offload", "two": "keep"}, run)[names] == "keep"
    assert _becomes({"two": "keep", "one": "offload"}, run)[names] == "offload"
    assert _becomes({"one": "offload", "aten.mul": "keep"}, run)[names] == "keep"
    (value,) = _named("recompute", run)
    assert _becomes({value.place: "recompute", "one": "keep", "**": "keep"}, run)[names] == "recompute"


def test_a_name_belongs_to_the_bytes_until_they_are_written_to() -> None:
    found = _becomes({"m": "keep"}, lambda x: actckpt.name(x * x, "m").mul_(2).sin().sum())
    assert found == {}  # what is saved is another value
    with actckpt.region({"m": "keep"}) as region:
        (actckpt.name(leaf(4) * 2, "m").mul_(2) * 1).sin().sum()
    with actckpt.region({"m": "keep"}) as region:
        y = actckpt.name(leaf(4) * 2, "m").mul_(2)
        z = y.sin()
    assert [value.action for value in region.report().values] == [Action.KEEP]  # as what it was made from
    z.sum().backward()
    same = _becomes({"m": "keep"}, lambda x: actckpt.name(actckpt.name(x * x, "m"), "m").sin().sum())
    assert same == {("m",): "keep"}


def test_inputs_can_be_offloaded_by_name_and_parameters_stay() -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def run(x: Tensor) -> Tensor:
        return (actckpt.name(x, "input") @ actckpt.name(weight, "weight")).sin().sum()

    assert _becomes({"input": "offload", "weight": "offload"}, run) == {("input",): "offload"}
    assert _becomes({"input": "recompute", "weight": "recompute"}, run) == {("input",): "keep"}


def test_the_region_in_which_a_value_was_made_decides() -> None:
    x = leaf(4) * 2
    with actckpt.region({"outer": "keep", "late": "offload"}) as region:
        y = x * x
        with actckpt.region({"outer": "offload", "inner": "offload"}):
            z = actckpt.name(actckpt.name(y, "outer").sin() * 3, "inner").sin()
            late = z * z
        result = (actckpt.name(late, "late").sin() * 2).sum()
    result.backward()
    found = {value.names: value.action.value for value in region.report().values if value.names}
    assert found == {("outer",): "keep", ("inner",): "offload", ("late",): "recompute"}


def test_names_in_reruns_and_under_other_hooks_hold_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        return actckpt.name(actckpt.name(x, "x").sin(), "s").exp().sin()

    x = leaf(64)
    expected = torch.autograd.grad(function(x).sum(), x)
    with actckpt.region({"s": "keep"}) as region:
        y = actckpt.checkpoint(function, x)
        assert_equal(torch.autograd.grad(y.sum(), x, retain_graph=True), expected)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)
    assert all(not value.names for value in region.report().values)
    with actckpt.region({"s": "keep"}), torch.autograd.graph.save_on_cpu():
        y = function(x)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)


def test_policy_functions_are_told_names_and_asked_again_where_one_comes_late() -> None:
    asked = []

    def policy(info: actckpt.SavedTensorInfo) -> Action:
        asked.append((str(info.op), info.names))
        return Action.RECOMPUTE

    with actckpt.region(policy):
        y = actckpt.name(actckpt.name(leaf(4) * 2, "early").sin().exp(), "late").sum()
    y.backward()
    assert asked == [
        ("aten.mul.Tensor", ("early",)),
        ("aten.exp.default", ()),
        ("aten.exp.default", ("late",)),
    ]


def test_reports_show_names_and_say_which_were_not_given() -> None:
    with actckpt.region({"weights": "keep", "weihgts": "keep"}) as region:
        y = Attention()(leaf(4, 8) * 2)
    table = region.report().table(places=True)
    assert "qkv, queries" in table and table.splitlines()[0].split() == ["place", "names", "bytes", "action", "why"]
    assert {"names": ["weights"], "action": "keep"}.items() <= next(
        value for value in region.report().as_dict()["values"] if value["names"] == ["weights"]
    ).items()
    (idle,) = region.report().operators_not_run
    assert idle.startswith("weihgts (nearest of those that ran: weights")
    with actckpt.region() as region:
        named = actckpt.name(leaf(4) * 2, "doubled")
        z = named.sin()
    assert "Made by aten.mul.Tensor" in region.report(explain=named) and "named doubled" in region.report(explain=named)
    (y.sum() + z.sum()).backward()


def test_parts_of_subclasses_are_named() -> None:
    x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    with actckpt.region({"m": "keep"}) as region:
        y = actckpt.name(x * 2, "m").sin().sum()
    assert [value.names for value in region.report().values if value.names] == [("m",), ("m",)]
    y.backward()


def test_inside_of_transforms_it_does_nothing() -> None:
    x = leaf(4, 3)
    with actckpt.region({"m": "keep"}):
        y = torch.func.vmap(lambda row: actckpt.name(row * 2, "m").sin())(x)
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x * 2).sin().sum(), x))


def test_under_torch_compile_it_is_nothing_and_breaks_no_graph() -> None:
    layer = Attention()
    x = torch.randn(4, 8)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x), layer(x))
    policy = save_only_these_names("qkv")
    run = torch.compile(lambda x: actckpt.checkpoint(layer, x, policy=policy), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"actckpt.checkpoint: this policy cannot be honoured under torch.compile"):
        run(x)


def test_a_traced_model_has_no_trace_of_it() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return actckpt.name(x.sin(), "s").cos()

    assert [node.op for node in torch.fx.symbolic_trace(Named()).graph.nodes] == [
        "placeholder",
        "call_method",
        "call_method",
        "output",
    ]


@pytest.mark.parametrize("text", ["", "a.b", "a::b", "a#0", "a@1", "a*", "a b", "[ab]"])
def test_a_text_that_means_something_else_in_selectors_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        actckpt.name(torch.ones(1), text)
    with pytest.raises(ValueError, match="is no name"):
        save_only_these_names(text)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="name: takes a tensor and its name, not a str and"):
        actckpt.name("x", torch.ones(1))  # type: ignore[type-var, arg-type]
    with pytest.raises(TypeError, match="not a tuple and 'x'"):
        actckpt.name((torch.ones(1),), "x")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'a' is to be both saved and offloaded"):
        save_and_offload_only_these_names(names_which_can_be_saved=["a"], names_which_can_be_offloaded=["a"])


def test_a_policy_by_names_that_the_model_does_not_give_warns_once() -> None:
    layer = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with actckpt.region(save_only_these_names("absent")):
                y = layer(torch.randn(2, 4)).sin()
            y.sum().backward()
            del y
    assert len(told) == 1 and "absent" in str(told[0].message)
