"""Places: the names of values, and policies that are tables of them."""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import on_device
import pytest
import torch
import torch.utils.checkpoint
from oracle import Checkpoint, assert_equal, in_region, plain, theirs
from torch import Tensor, nn

import actckpt
from actckpt import Action, Place


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mlp(self.norm(x))).tanh()


class Model(nn.Module):
    """May checkpoint its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)
        self.checkpoint: Checkpoint = plain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.checkpoint(layer, x)
        return self.head(x).exp()


def _input() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, requires_grad=True)


def _places(report: Any) -> list[str]:
    return [value.as_dict()["place"] for value in report.values if value.place is not None]


def _in_one_region(model: Any, x: Tensor, policy: Any = "recompute") -> list[str]:
    with actckpt.region(policy) as region:
        y = model(x)
    y.sum().backward()
    return _places(region.report())


def _gradients(model: nn.Module, run: Any) -> list[Tensor]:
    model.zero_grad()
    x = _input()
    run(x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


_LAYER = [*(f"norm::aten.native_layer_norm.default#0.{result}" for result in range(3))]
_LAYER += ["mlp.0::aten.addmm.default#0.0", "mlp.1::aten.gelu.default#0.0"]


def test_a_report_has_the_place_of_each_value_and_places_do_not_change_from_step_to_step() -> None:
    model = Model()
    steps = [_in_one_region(model, _input()) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]
    assert len(set(steps[0])) == len(steps[0])
    for layer in ("layers.0", "layers.1"):
        assert {f"{layer}.{place}" for place in _LAYER} | {f"{layer}::aten.tanh.default#0.0"} <= set(steps[0])
    assert "Model::aten.exp.default#0.0" in steps[0]
    assert {str(Place.parse(place)) for place in steps[0]} == set(steps[0])


def test_regions_around_layers_and_one_around_the_model_give_the_same_places() -> None:
    model = Model()
    whole = set(_in_one_region(model, _input()))
    seen: set[str] = set()

    def policy(info: actckpt.SavedTensorInfo) -> Action:
        if info.place is not None:
            seen.add(str(info.place))
        return Action.RECOMPUTE

    actckpt.apply(model, policy=policy, blocks="layers.*")
    for _ in range(2):
        model(_input()).sum().backward()
    assert seen == {place for place in whole if place.startswith("layers.")}


def test_modules_that_are_added_elsewhere_change_no_places() -> None:
    model = Model()
    before = set(_in_one_region(model, _input()))
    model.other = nn.Linear(3, 3)
    model.layers[1].mlp.append(nn.Dropout(0.5))
    model.layers.append(Block())
    _in_one_region(model, _input())  # leaves the known structures in the middle: names are looked up from the next on
    assert before < set(_in_one_region(model, _input()))


class Branching(nn.Sequential):
    odd = False

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return (self[1](x) if self.odd else self[2](x.sin())).exp().exp()


def test_a_region_that_goes_other_ways_has_the_names_of_the_way_that_it_went() -> None:
    model = Branching(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    found: dict[bool, list[list[str]]] = {True: [], False: []}
    for step in range(8):
        model.odd = step % 3 == 0
        with actckpt.region() as region:
            y = model(_input())
        found[model.odd].append(_places(region.report()))
        y.sum().backward()
    for ways in found.values():
        assert ways[-1] == ways[-2]
    assert found[True][0] == found[True][-1]
    assert "Branching::aten.exp.default#1.0" in found[False][-1]


def test_models_of_one_structure_do_not_take_each_others_names() -> None:
    models = {name: nn.Sequential(OrderedDict({"norm": nn.LayerNorm(8), name: nn.Sigmoid()})) for name in ("a", "b")}
    for name in [*models] * 3:
        assert _in_one_region(models[name], _input())[-1] == f"{name}::aten.sigmoid.default#0.0"


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).exp()).exp()


def test_calls_of_a_shared_module_count_per_step_and_occurrences_per_call() -> None:
    model = Shared()
    of_module = {f"inner.1{call}::aten.sigmoid.default#0.0" for call in ("", "@1")}
    for _ in range(3):
        assert of_module | {f"Shared::aten.exp.default#{n}.0" for n in (0, 1)} <= set(_in_one_region(model, _input()))


@pytest.mark.parametrize("has_backward", [True, False])
def test_calls_count_over_the_regions_of_a_step_which_ends_with_what_it_saved(has_backward: bool) -> None:
    layer = nn.Sigmoid()
    for _ in range(3):
        x, found = _input(), []
        for _ in range(3):
            with actckpt.region() as region:
                x = layer(x).exp()
            found.append(region)
        x.sum().backward() if has_backward else None
        names = [_places(region.report())[0].partition("::")[0] for region in found]
        assert names == ["Sigmoid", "Sigmoid@1", "Sigmoid@2"]


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Shared()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.inner(x)
            raise KeyError
        except KeyError:
            x = x.exp()
        x = self.inner(x)
        if self.fails:
            raise ValueError("out of memory, or so")
        return x.exp()


def test_exceptions_inside_and_through_regions_leave_the_places_as_they_are() -> None:
    model = Failing()
    before = _in_one_region(model, _input())
    assert "Failing::aten.exp.default#1.0" in before and "inner.inner.1@3::aten.sigmoid.default#0.0" in before
    model.fails = True
    kept = []
    for _ in range(2):
        try:
            _in_one_region(model, _input())
        except ValueError as error:
            kept.append(error)  # with its frames, and all that the region saved
    model.fails = False
    assert len(kept) == 2 and _in_one_region(model, _input()) == before


def test_frames_are_not_held_once_a_region_has_closed() -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(weakref.ref(x))
            return x.exp()

    alive: list[Any] = []
    with actckpt.region() as region:
        Local()(_input())
    assert [one() for one in alive] == [None]
    assert _places(region.report()) == ["Local::aten.exp.default#0.0"]


def test_where_no_module_runs_the_line_of_the_region_stands_for_it() -> None:
    x, line = _input(), sys._getframe().f_lineno + 1
    with actckpt.region() as region:
        x.sin().exp().sum()
    assert _places(region.report()) == [f"test_places.py:{line}::aten.exp.default#0.0"]


def test_what_torch_wraps_modules_in_is_left_out() -> None:
    model = Model()
    before = _in_one_region(model, _input())

    class _Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

        def forward(self, x: Tensor) -> Tensor:
            return self._checkpoint_wrapped_module(x)

    model.layers[0] = _Checkpointed(model.layers[0])
    assert _in_one_region(model, _input()) == before


# Tables


def _becomes(policy: Any, model: nn.Module) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with actckpt.region(policy) as region:
            y = model(_input())
    y.sum().backward()
    found = [value.as_dict() for value in region.report().values]
    return {value["place"]: value["action"] for value in found if value["place"] is not None}


_GELU, _NORM = "layers.{}.mlp.1::aten.gelu.default#0.0", "layers.{}.norm::aten.native_layer_norm.default#0.{}"
#: A place wins, then the last selector.
_SELECTORS: dict[Any, str] = {
    _GELU.format(0): "recompute",
    "**::aten.gelu": "offload",
    "layers.*.mlp.1::aten.gelu": "keep",
    torch.ops.aten.tanh: "keep",
    "**.norm": "keep",
}


@pytest.mark.parametrize(
    ("model", "table", "kept"),
    [
        (Model, {Place.parse(_GELU.format(1)): Action.KEEP}, {_GELU.format(1)}),
        (Model, {_GELU.format(1): "keep"}, {_GELU.format(1)}),
        (Model, {_NORM.format(0, 1): "keep"}, {_NORM.format(0, 1)}),
        (Shared, {"inner.1@1::aten.sigmoid.default#0.0": "keep"}, {"inner.1@1::aten.sigmoid.default#0.0"}),
        (
            Model,
            _SELECTORS,
            {_GELU.format(1)}
            | {f"layers.{layer}::aten.tanh.default#0.0" for layer in (0, 1)}
            | {_NORM.format(layer, result) for layer in (0, 1) for result in (0, 1, 2)},
        ),
    ],
    ids=["place", "its name", "a result", "a call", "selectors"],
)
def test_a_table_decides_by_place_and_the_rest_is_recomputed(model: Any, table: Any, kept: set[str]) -> None:
    everything, found = _becomes("recompute", model()), _becomes(table, model())
    assert found.keys() == everything.keys()
    assert {place for place, action in found.items() if action == "keep"} == kept
    assert {found[place] for place in everything.keys() - kept} == {"recompute"}


_TABLES: dict[str, Any] = {
    "by place": {"layers.1.mlp.1::aten.gelu.default#0.0": "keep", "layers.0.mlp.0::aten.addmm.default#0.0": "offload"},
    "by selector": {"**::aten.addmm": Action.KEEP, "**.norm": "offload", "head": "prefer_offload"},
    "all kept": {"**": "keep"},
    "one result": {"**.norm::**#0.1": "keep"},
}


#: Ways in which a model checkpoints its layers itself: a rerun begins in the layer, and names go by the model.
_RERUNNING: dict[str, Checkpoint] = {
    "torch": theirs,
    "torch, a function": lambda layer, x: theirs(lambda y: layer(y), x),
    "actckpt": actckpt.checkpoint,
}


@pytest.mark.filterwarnings("ignore:.*names in its first")
@pytest.mark.parametrize("name", _TABLES)
@pytest.mark.parametrize("way", ["region", "checkpoint", "apply", *_RERUNNING])
def test_gradients_under_tables_are_those_of_plain_training(name: str, way: str) -> None:
    model, table = Model(), _TABLES[name]
    expected = _gradients(model, model)
    methods: dict[str, Checkpoint] = {
        "region": in_region(table),
        "checkpoint": functools.partial(actckpt.checkpoint, policy=table),
    }
    if way not in methods:
        model.checkpoint = _RERUNNING.get(way, plain)
        actckpt.apply(model, policy=table, blocks="layers.*")
    if way == "apply":
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for _ in range(3):
        assert_equal(_gradients(model, functools.partial(methods.get(way, plain), model)), expected)
        model.layers[0](_input())  # alone it has other names, until the next forward


@pytest.mark.filterwarnings("ignore:.*names in its first")
@pytest.mark.parametrize("way", _RERUNNING)
def test_a_rerun_that_is_named_otherwise_than_its_forward_raises(way: str) -> None:
    """A part of the model was called alone in between: values of the same shapes would take each other's places."""
    model = Model()
    # Two tensors of one shape are saved in the rerun of a layer: what stays of them goes by names.
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()) for _ in "ab")
    model.checkpoint = _RERUNNING[way]
    first, second = "layers.0.1::aten.tanh.default", "3::aten.sigmoid.default"
    actckpt.apply(model, policy={first: "keep", second: "keep"}, blocks="layers.*")
    x = torch.randn(4, 8)
    model(x).sum().backward()
    y = model(x)
    model.layers[0](x)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_entries_that_match_nothing_are_reported_with_the_nearest_place_and_told_if_none_matches() -> None:
    model = Model()
    with actckpt.region({"head": "keep", "layers.0.mpl.1::aten.gelu.default#0.0": "keep"}) as region:
        model(_input())
    (idle,) = region.report().operators_not_run
    assert idle.startswith("layers.0.mpl.1::aten.gelu") and "layers.0.mlp.1::aten.gelu.default#0.0" in idle
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            _in_one_region(model, _input(), {"layer.0": "keep"})
    assert [str(one.message).count("none of the places that its policy names") for one in told] == [1]
    assert "layer.0 (nearest of those that ran: layers.0" in str(told[0].message)


@pytest.mark.parametrize(
    ("entry", "near"),
    [
        ("layrs.0.mlp.1", "layers.0.mlp.1, "),
        ("layrs.*.mlp.1", "layers."),
        ("layers.0.mlp", "layers.0.mlp.**)"),
        ("lyers.0.mlp.1::aten.gelu", "layers.0.mlp.1::aten.gelu.default#0.0, "),
    ],
)
def test_blocks_whose_policy_matches_nothing_warn_where_backward_is_called_with_what_is_near(
    entry: str, near: str
) -> None:
    model = Model()
    actckpt.apply(model, policy={entry: "keep"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(_input()).sum().backward()
    (one,) = told
    if on_device.device_type == "cpu":  # else a thread of autograd's comes there, which no line of the program is on
        assert one.filename == __file__ and "backward()" in linecache.getline(one.filename, one.lineno)
    assert f"that ran: {near}" in str(one.message)


def test_a_table_of_a_whole_model_does_not_warn_in_regions_where_none_of_it_runs() -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x = _input()
            for layer in (*model.layers, model.head):
                with actckpt.region({"Linear": "keep"}):
                    x = layer(x)
            x.exp().sum().backward()


def test_opaque_takes_selectors() -> None:
    model = Model()
    actckpt.configure(opaque=["layers.0.mlp.*::aten.gelu", "layers.1.norm"])
    with actckpt.region() as region:
        model(_input())
    kept = {str(value.place) for value in region.report().values if value.why.startswith("configure(opaque")}
    norm = "layers.1.norm::aten.native_layer_norm.default#0."
    assert kept == {"layers.0.mlp.1::aten.gelu.default#0.0", f"{norm}0", f"{norm}1", f"{norm}2"}
