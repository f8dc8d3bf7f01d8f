"""Arguments that are nearly right: taken where their meaning is plain, else refused where they were written."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt import Action, config
from actckpt.errors import BlocksError
from actckpt.policies import PerOp


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))


def _leaf() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True)


def _no_step() -> None:
    pytest.fail("the step ran")


def _plan() -> actckpt.Plan:
    block = {"forward_s": 1.0, "backward_s": 2.0, "working_set_bytes": 8, "values": []}
    return actckpt.planner.solve({"version": 1, "classes": {"b": block}, "stack": ["b"]}, budget=2**20)


class _Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))


# Policies: of regions, of checkpoint and of apply.

_ADDMM = torch.ops.aten.addmm
_POLICIES: list[tuple[Any, str]] = [
    (_ADDMM, r"^policy is one operator, aten\.addmm\. Pass a list .*: policy=\[torch\.ops\.aten\.addmm\]\.$"),
    (_ADDMM.default, r"one operator, aten\.addmm\.default\. .* policy=\[torch\.ops\.aten\.addmm\.default\]"),
    (torch.ops.higher_order.flex_attention, "^policy is one operator, flex_attention"),
    (torch.nn.Linear, r"^policy is a class, Linear\. .* actckpt\.apply\(model, blocks="),
    (torch.nn.Linear(2, 2).forward, r"^policy is the forward of a Linear\. .* actckpt\.region\(\)\(module\)"),
    (torch.nn.GELU(), r"policy is a module, .*actckpt\.region\(\)\(module\)"),
    (torch.nn.Sequential(torch.nn.GELU()), r"policy is a module, .*actckpt\.region\(\)\(module\)"),
    (torch.zeros(2), r"^policy is a tensor of shape \(2,\)\. .* with actckpt\.region\(\)"),
    (torch.mm, "^policy is a function of torch, mm. Pass a list"),
    (torch.nn.functional.linear, "^policy is a function of torch, linear. Pass a list"),
    (3, "policy=3 is a int"),
    ("aten.mm", r"^policy='aten\.mm' names an operator\. Pass a list of the operators to keep: \['aten\.mm'\]"),
    ("mm", r"^policy='mm' names an operator\. Pass a list of the operators to keep: \['aten\.mm'\]"),
    ("KEEP", "is not an action.* Did you mean 'keep'"),
    ("recomputee", "Did you mean 'recompute'"),
    ("atention", "Did you mean 'attention'"),
    ("sometimes", "'recompute'"),
    ("full", r"^policy='full' is not an action.* Did you mean 'recompute'\?$"),
    ("selective", r"Did you mean 'matmuls'\?$"),
    ("none", r"Did you mean 'keep'\?$"),
    ("Action.OFFLOAD", "is not an action.* Did you mean 'offload'"),
    ("40%", r"^policy='40%' is a budget\. Pass activation_budget='40%' in the place of the policy\.$"),
    ("70 GiB", r"is a budget\. Pass budget='70 GiB' in"),
    ("1.5GiB", r"is a budget\. Pass budget='1\.5GiB' in"),
    ("auto", r"is a budget\. Pass budget='auto' in"),
    ("/tmp/plan.json", r"^policy='/tmp/plan\.json' is a path\. .*actckpt\.Plan\.load\('/tmp/plan\.json'\)"),
    ("plan.json", r"^policy='plan\.json' is a path\. .*actckpt\.Plan\.load\('plan\.json'\)"),
    (Path("plan.json"), r"^policy is a path\. .*actckpt\.Plan\.load\('plan\.json'\)"),
    (_plan().to_dict(), r"^policy is a plan as plain data\. .*actckpt\.Plan\.from_dict"),
    ([torch.mm], "not an operator"),
    (["aten.addmn"], "Nearest: .*aten.addmm"),
    (["aten.addmmm"], r"no operator 'aten\.addmmm'.*aten\.addmm"),
    (["aten.mm.defautl"], "has no overload 'defautl'; it has default"),
    (["higher_order.cond.default"], "has no overload 'default'; it has none"),
    ({"aten.mm": "kep"}, "Did you mean 'keep'"),
    ({"layers.0::aten.mm": "kep"}, "Did you mean 'keep'"),
    ({"layers.0::aten.mmm.default#0.0": "keep"}, "aten.mmm.default. Nearest: .*aten.mm"),
    ({"layers.*::aten.addmn": "keep"}, "aten.addmn. Nearest: .*aten.addmm"),
    ({"aten.addmn": "keep"}, "aten.addmn. Nearest: .*aten.addmm"),
    ({"layers.*::": "keep"}, "after '::' goes an operator"),
    ({3: "keep"}, "the key 3 of the dict is a int"),
    ({_Rows: "keep"}, "is a type. Pass an actckpt.Place"),
]
_OF_TORCH = {"MUST_SAVE": "KEEP", "PREFER_SAVE": "KEEP", "MUST_RECOMPUTE": "RECOMPUTE", "PREFER_RECOMPUTE": "RECOMPUTE"}
_OF_TORCH |= {"MUST_CPU_OFFLOAD": "OFFLOAD", "PREFER_CPU_OFFLOAD": "PREFER_OFFLOAD"}
_POLICIES += [
    (member, rf"^policy=CheckpointPolicy\.{name} .* Pass actckpt\.Action\.{_OF_TORCH[name]}, or a function")
    for name, member in CheckpointPolicy.__members__.items()
]
_TAKERS: dict[str, Callable[[Any], object]] = {
    "region": lambda policy: actckpt.region(policy),
    "checkpoint": lambda policy: actckpt.checkpoint(torch.exp, _leaf(), policy=policy),
    "apply": lambda policy: actckpt.apply(_model(), policy=policy),
}


@pytest.mark.parametrize("taker", _TAKERS)
@pytest.mark.parametrize(("policy", "message"), _POLICIES, ids=range(len(_POLICIES)))
def test_what_is_nearly_a_policy_is_refused_with_the_policy_that_was_meant(
    policy: Any, message: str, taker: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _TAKERS[taker](policy)


@pytest.mark.parametrize("answer", ["keep", "recompute"])
def test_a_policy_function_may_return_the_name_of_an_action(answer: Any) -> None:
    x = torch.rand(8, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with actckpt.region(lambda info: answer) as region:
        y = x.exp().sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
    assert (region.report().recomputed_bytes > 0) == (answer == "recompute")


_ANSWERS: list[tuple[Any, str]] = [
    (lambda info: "kep", r"The policy returned 'kep', a str, .* or one of 'keep', "),
    (lambda info: None, "The policy returned"),
    (lambda ctx, op, *args, **kwargs: Action.KEEP, "The policy returned"),
    (lambda ctx, op, *args, **kwargs: 7, "The policy returned"),
]


@pytest.mark.parametrize(("policy", "message"), _ANSWERS, ids=["text", "nothing", "action for a call", "number"])
def test_a_policy_that_returns_something_else_raises_in_forward(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), actckpt.region(policy):
        _leaf().sin().exp()
    y = _leaf().sin()  # and leaves nothing open
    assert "Handle" not in type(y.grad_fn._raw_saved_self).__name__
    y.sum().backward()


def test_a_method_of_a_module_may_be_a_policy() -> None:
    class Net(torch.nn.Module):
        def policy(self, info: actckpt.SavedTensorInfo) -> actckpt.Action:
            return actckpt.Action.RECOMPUTE

    with actckpt.region(Net().policy) as region:
        _leaf().exp().sin()
    assert region.report().recomputed_bytes > 0


# Calls: one line each.

_LAYER: Any = torch.nn.Linear(4, 4)
_sequential: Any = actckpt.checkpoint_sequential
_checkpoint: Any = actckpt.checkpoint
_offload: Any = actckpt.offload
_region: Any = actckpt.region
_measures = partial(actckpt.plan, _no_step)
_IS_NO_MODEL: list[tuple[Any, str]] = [
    (None, "model is a NoneType, not a module. Pass the model itself"),
    (_model().forward, "model is a method, not a module. Pass the Sequential that it belongs to"),
    (_model().parameters(), "model is a generator, not a module. Pass the model itself"),
    (list(_model()), "model is a list, not a module. Pass the model itself"),
    (torch.nn.Linear, "model is the class Linear, not a module. Pass the model itself"),
]
#: How each budget is read: tests/unit/budget/test_sizes_of_budgets.py.
_BUDGETS: list[tuple[dict[str, Any], str]] = [
    ({"budget": "1GiB", "activation_budget": "40%"}, "both of budget and activation_budget"),
    ({"budget": 0}, "budget=0 is 0 bytes"),
    ({"budget": 24}, "budget=24 is 24 bytes, less than 1.00 MiB.*'24GiB'"),
    ({"budget": 70.0}, r"budget=70.0 is 70 bytes, .*'70GiB'"),
    ({"budget": "24"}, "budget='24' has no unit"),
    ({"budget": 1.5}, "budget=1.5 is not a size"),
    ({"budget": "lots"}, "budget='lots' is not a size"),
    ({"budget": True}, "budget=True is not a size"),
    ({"activation_budget": 0}, "activation_budget=0 is 0 bytes"),
    ({"activation_budget": float("nan")}, "activation_budget=nan is not a size"),
    ({"activation_budget": "0%"}, "activation_budget='0%' is no share"),
    ({"activation_budget": "140%"}, "activation_budget='140%' is no share"),
    ({"activation_budget": "50"}, "activation_budget='50' has no unit. Pass a share like '50%'"),
]
_PINS: list[tuple[Any, str]] = [
    (["x0"], r"^pins=\['x0'\] is a list, not a dict\. Pass actions by names of values"),
    ("keep", r"^pins='keep' is a str, not a dict\."),
    ({"x0": "kep"}, r"^pins: 'x0' is 'kep'\. Pass one of .* Did you mean 'keep'\?$"),
    ({"x0": ["keep"]}, r"^pins: 'x0' is \['keep'\]\. Pass one of keep, recompute, offload\."),
]


def _on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return _model()


def _applies(**options: Any) -> Callable[[], object]:
    return lambda: actckpt.apply(_model(), **options)


def _checkpoints(**options: Any) -> Callable[[], object]:
    return lambda: _checkpoint(torch.exp, _leaf(), **options)


def _calls_layer(**options: Any) -> Callable[[], object]:
    return lambda: _checkpoint(_LAYER, _leaf(), **options)


def _reports(**options: Any) -> Callable[[], object]:
    def call() -> None:
        model = _model()
        actckpt.apply(model)
        actckpt.report(model, **options)

    return call


def _explains(wrong: Any) -> Callable[[], object]:
    def call() -> None:
        with actckpt.region() as region:
            _leaf().exp()
        region.report(explain=wrong)

    return call


def _compares(policies: dict[str, Any]) -> Callable[[], object]:
    return lambda: actckpt.compare(_no_step, model=_model(), policies=policies)


def _without_grad(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(lambda: call())  # type: ignore[no-any-return]


def _twice() -> None:
    model = _model()
    actckpt.apply(model)
    actckpt.apply(model)


_MISSPELT: list[tuple[dict[str, Any], str]] = [
    ({"polcy": "keep"}, r"neither checkpoint nor Linear has a keyword 'polcy'\. Did you mean policy\?"),
    ({"presrve_rng_state": False}, r"keyword 'presrve_rng_state'\. Did you mean preserve_rng_state\?"),
    ({"policy": "offload", "min_bytes": "1KiB"}, r"keyword 'min_bytes'\. .* with actckpt\.offload\(min_bytes="),
    ({"budget": "1GiB"}, r"keyword 'budget'\. A budget is one of a model, .*: actckpt\.apply\(model, budget="),
    ({"activaton_budget": "50%"}, r"'activaton_budget'\. .*: actckpt\.apply\(model, activation_budget="),
]
_OF_APPLY: list[tuple[dict[str, Any], str]] = [
    ({"activaton_budget": "50%"}, "activation_budget"),
    ({"budgt": "1GiB"}, "budget"),
    ({"polcy": "keep"}, "policy"),
    ({"blcks": "0"}, "blocks"),
    ({"min_byte": 1}, "min_bytes"),
    ({"min_byte": 1, "policy": "offload"}, "min_bytes"),
    ({"budget": "1GiB", "optimzer": None}, "optimizer"),
    ({"min_bytes": 1, "activaton_budget": "50%"}, "activation_budget"),
]
_DECORATOR = "no function was given, but"
_SETTING: dict[str, Any] = {"spil_dir": "x"}
_STORE = "Pass 'auto', 'host' or 'disk'"
_NO_STORE = r"^offload: to is a \w+, not a store\. .* with actckpt\.offload\(\): .*\.apply\(model, policy='offload'\)"
_SIZES: list[Any] = [None, -1, 1.5, True, "", "x", "-1MiB", "1 parsec", "1MiBiB", [], b"1"]
_PLAN_OPTIONS: dict[str, tuple[Any, str]] = {
    "plan": (_plan(), r"^{name} is a Plan, .*: actckpt\.apply\(model, policy=plan\)\.$"),
    "path": ("plan.json", r"^{name}='plan\.json' is a path.*actckpt\.Plan\.load\('plan\.json'\)"),
}
_plans: Any = partial(_measures, model=_model())
_decorates = partial(_checkpoint, None)
_in_segments: Any = partial(_sequential, [torch.sin] * 4, 2, _leaf())
_OF_META = r"parameter '0\.0\.weight' is on the meta device.*actckpt\.estimate"
_NUM_ROWS = "Pass the number of rows, from 1 on, or None"
_NOT_A_FUNCTION = r"5 is not a function to decorate\. Put @actckpt\."
#: Calls that raise a `ValueError`, and its message.
_WRONG_VALUES: list[tuple[Callable[[], object], str]] = [
    # PerOp and region
    (lambda: PerOp(["aten.mm"]), r"^PerOp: .* is a list\. Pass a dict .*; .* itself as policy\.$"),  # type: ignore[arg-type]
    (lambda: PerOp({"aten.mm": "matmuls"}), r"the action of aten\.mm='matmuls' is not an action"),  # type: ignore[dict-item]
    (lambda: _region(_plan()), r"^policy is a Plan, which .*: actckpt\.apply\(model, policy=plan\)\.$"),
    # checkpoint
    (_checkpoints(use_reentrant=True), "use_reentrant=False"),
    (_checkpoints(policy="nothing"), "recompute"),
    (_checkpoints(determinism_check="sometimes"), "'none'"),
    (_checkpoints(debug=True, context_fn=lambda: (contextlib.nullcontext(),) * 2), "Drop one"),
    (_checkpoints(policy="keep", context_fn=lambda: None), "policy= and context_fn="),
    (partial(_decorates, depth=1), _DECORATOR),
    (partial(_decorates, 3), _DECORATOR),
    (partial(_checkpoint, use_reentrent=False), r"keyword 'use_reentrent'.* Did you mean use_reentrant\?$"),
    (partial(_checkpoint, budget="1GiB"), r"keyword 'budget'.* actckpt\.apply\(model, budget=\.\.\.\)\.$"),
    (partial(_checkpoint, use_reentrant=True), "use_reentrant=True is not supported"),
    (partial(_checkpoint, determinism_check="sometimes"), "determinism_check"),
    # checkpoint_sequential
    *[(partial(_sequential, [torch.sin] * 4, n, _leaf()), f"segments={n} does not fit 4") for n in (0, -1, 5)],
    (partial(_in_segments, unknown_keyword=1), "unknown_keyword"),
    (partial(_in_segments, use_reentrant=True), "use_reentrant"),
    (partial(_in_segments, budget="1GiB"), r"arguments budget\..* actckpt\.apply\(model, budget=\.\.\.\)\.$"),
    (
        partial(_sequential, _model(), "2", _leaf()),
        r"^checkpoint_sequential: segments='2' does not fit \d+ func.*Pass a num",
    ),
    # offload and configure
    *[(partial(_offload, to), _STORE) for to in ("gpu", None, "", "Disk", 1)],
    *[(partial(_offload, to), _NO_STORE) for to in (_model(), _model().forward)],
    *[(partial(_offload, min_bytes=size), r"min_bytes=.* is not a size") for size in _SIZES],
    (partial(_offload, min_bytes="3 apples"), "^offload: min_bytes='3 apples' is not a size"),
    (partial(actckpt.configure, bandwidth=5, disk_limit=1), r"unknown setting bandwidth\. Known: .*spill_dir"),
    (partial(actckpt.configure, **_SETTING), r"unknown setting spil_dir\. Did you mean spill_dir\? Known: "),
    # apply
    (_applies(policy="offload", min_bytes="x"), "min_bytes"),
    (_applies(policy="offload", to="dsk"), "to='dsk' is not a store"),
    (_applies(use_reentrant=True), "use_reentrant=True is not supported"),
    (_applies(determinism_check="no"), "determinism_check should be one of"),
    (_applies(policy="matmuls", context_fn=lambda: None), "policy= and context_fn= both say"),
    (_applies(min_bytes=1), r"unknown option min_bytes for policy='recompute'\. With policy='offload' it"),
    (
        _applies(early_stop=True, policy="offload"),
        r"option early_stop for .*'offload'\. With other policies it is one\.",
    ),
    (_applies(race=False), r"option race for .*\. With a budget in place of a policy it is one\. Known: "),
    *[(_applies(**o), rf"unknown option .*\. Did you mean {m}\? Known: .*activation_budget, bu") for o, m in _OF_APPLY],
    # report
    (_reports(group_by="modules"), r"^report: group_by='modules'\. Pass 'operator', 'module' or 'type'"),
    (_reports(group_by="modul"), r"^report: group_by='modul'\. .* Did you mean 'module'\?$"),
    *[(_reports(top=top), rf"^report: top={top!r}\. {_NUM_ROWS}") for top in (0, -1, "a", 2.5, True)],
    # budgets, plans, pins
    (_plans, "neither of budget and activation_budget"),
    *[(call, message) for options, message in _BUDGETS for call in (partial(_plans, **options), _applies(**options))],
    *[(_compares({"a": {"budget": "1GiB"}, "mine": o}), rf"^compare: policies\['mine'\]: .*{m}") for o, m in _BUDGETS],
    (_applies(policy="matmuls", budget="1GiB"), "a budget beside policy='matmuls'"),
    (_applies(budget="1GiB", early_stop=False), "unknown option early_stop beside a budget"),
    (_applies(activation_budget="50%", race="no"), r"^apply: race='no'\. Pass True or False\."),
    (partial(_plans, activation_budget="50%", race="no"), r"^plan: race='no'\. Pass True or False\."),
    *[(_applies(activation_budget="50%", pins=pins), message) for pins, message in _PINS],
    *[(partial(_plans, activation_budget="50%", pins=pins), message) for pins, message in _PINS],
    *[
        (partial(call, **{name: value}), message.format(name=name))
        for call in (partial(actckpt.apply, _model()), _plans)
        for name in ("budget", "activation_budget")
        for value, message in _PLAN_OPTIONS.values()
    ],
    (partial(_measures, model=_on_meta(), activation_budget="50%"), f"^plan: {_OF_META}"),
    (partial(actckpt.compare, _no_step, model=_on_meta()), f"^compare: {_OF_META}"),
]
_NOT_MANAGERS = "^checkpoint: context_fn returned .* two context managers"
_NOT_TRACKERS = "^checkpoint: rng_trackers=.* a list of functions that return track"
_IS_A_CLASS = r"^checkpoint: Linear is a class of modules.*checkpoint\(layer, x\) with"
_IS_A_TENSOR = r"a tensor .* is not a function\. The function comes first: .*\(layer, x\)"
_IS_A_RESULT = r"a tensor of shape \(2, 4\) is not a function\. Pass it uncalled.*\(layer, x\)"
_IS_A_LIST = r"^plan: model is a list, not a module\. Pass the model itself"
#: The same for a `TypeError`.
_WRONG_TYPES: list[tuple[Callable[[], object], str]] = [
    *[(_checkpoints(context_fn=lambda o=o: o), _NOT_MANAGERS) for o in (3, None, (torch.enable_grad(),))],
    *[(_checkpoints(rng_trackers=o), _NOT_TRACKERS) for o in (_model, [3], ["get_cuda_rng_tracker"])],
    *[(_calls_layer(**keywords), message) for keywords, message in _MISSPELT],
    *[(_without_grad(_calls_layer(**keywords)), message) for keywords, message in _MISSPELT],
    (_calls_layer(blocks=3), r"forward\(\) got an unexpected keyword argument 'blocks'"),
    (lambda: _checkpoint(_LAYER(_leaf())), _IS_A_RESULT),
    (lambda: _checkpoint(_leaf(), _LAYER), _IS_A_TENSOR),
    *[(partial(_checkpoint, torch.nn.Linear, 4, 4, **keywords), _IS_A_CLASS) for keywords in ({}, {"bias": True})],
    (lambda: actckpt.checkpoint()(5), _NOT_A_FUNCTION),  # type: ignore[arg-type]
    (lambda: actckpt.offload()(5), _NOT_A_FUNCTION),  # type: ignore[arg-type]
    *[(_explains(wrong), "takes a tensor of the region") for wrong in ("x", 0, [])],
    (
        partial(_sequential, 2, _model(), _leaf()),
        "^checkpoint_sequential: functions is a int. Pass a Sequential or a list of",
    ),
    (partial(_measures, model=[_model()], budget="1GiB"), _IS_A_LIST),
    (partial(_measures, model=[_model()], activation_budget="50%"), _IS_A_LIST),
    *[
        (partial(call, model), f"^{call.__name__}: {message}.*actckpt.{call.__name__}")
        for call in (actckpt.apply, actckpt.remove, actckpt.report)
        for model, message in _IS_NO_MODEL
    ],
]
_NO_ROWS = r"stand in a row\. Pass blocks=: .*\(Linear, of which there are 3\).*'rows\.0', 'rows\.1'"
_NO_INNER = "no modules inside that are called: give apply the model around it"
#: The same for a `BlocksError`.
_WRONG_BLOCKS: list[tuple[Callable[[], object], str]] = [
    (_applies(blocks=["9"]), r"no module .* is named '9'; it has 6\. The first: 0, 0\.0, 0\.1"),
    (_applies(blocks=[1]), r"blocks=1 is a int.* \(texts, also for numbers"),
    (_twice, r"^apply: .* checkpointed already, .*\. Call actckpt\.remove"),
    (lambda: actckpt.apply(_Rows()), f"^apply: found no repeated blocks .*{_NO_ROWS}"),
    (partial(actckpt.apply, _model()[0]), "^apply: found no repeated blocks.*GELU.*Linear"),
    (partial(actckpt.apply, torch.nn.LSTM(4, 4, 2)), f"^apply: found no repeated blocks .*{_NO_INNER}"),
    *[
        (
            partial(call, _model()),
            rf"^{name}: none of the .*is checkpointed\. Call {name} on the model that was given to act",
        )
        for name, call in (("remove", actckpt.remove), ("report", actckpt.report))
    ],
]
_CALLS = [
    (call, error, message)
    for error, calls in ((ValueError, _WRONG_VALUES), (TypeError, _WRONG_TYPES), (BlocksError, _WRONG_BLOCKS))
    for call, message in calls
]


@pytest.mark.parametrize(("call", "error", "message"), _CALLS, ids=range(len(_CALLS)))
def test_an_argument_that_is_none_is_refused_in_one_line(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    before = config.settings()
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value) and config.settings() == before


@pytest.mark.parametrize(
    "options",
    [{"policy": "offload", "min_bytes": "x"}, {"determinism_check": "no"}, {"policy": "sometimes"}, {"budget": 24}],
    ids=str,
)
def test_apply_checks_options_before_it_patches(options: dict[str, Any]) -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"min_bytes|determinism|recompute|budget"):
        actckpt.apply(model, **options)
    assert not model._forward_pre_hooks
    assert actckpt.apply(model) == ("0", "1")


def test_a_folder_that_cannot_be_written_to_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", tmp_path / "file", ""):
        with pytest.raises(ValueError, match=r"^configure: spill_dir='.*' is not a folder that can be written to.*\.$"):
            actckpt.configure(spill_dir=folder)
    assert actckpt.configure(spill_dir=os.fsencode(tmp_path)).spill_dir == str(tmp_path)  # bytes are a folder, too


def _with_policies(x: torch.Tensor, *, policies: int, min_bytes: int = 0, budget: int = 0) -> torch.Tensor:
    return x * policies + budget


@pytest.mark.parametrize(
    "function", [_with_policies, lambda x, **keywords: _with_policies(x, **keywords)], ids=["named", "any"]
)
def test_keywords_that_the_function_takes_go_to_it_whatever_they_are_like(function: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    assert actckpt.checkpoint(function, x, policies=3, min_bytes=1).sum() == 6
    assert actckpt.checkpoint(function, x, policies=3, policy="keep", budget=1).sum() == 8


def test_an_argument_that_the_function_itself_changed_is_not_said_to_have_changed_after_it() -> None:
    def change(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = x * t
        t.add_(1)
        return y

    loss = actckpt.checkpoint(change, torch.ones(2, requires_grad=True), torch.ones(2)).sum()
    with pytest.raises(actckpt.errors.InputChangedError, match="by its own function or after it"):
        loss.backward()


@pytest.mark.parametrize("audit", ["first", "always"])
def test_hooks_that_change_bytes_are_not_said_to_be_writes_to_memory(audit: Any) -> None:
    actckpt.configure(audit=audit)  # until the fixture of all tests puts it back
    for _ in range(3):
        x = torch.rand(8, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            with actckpt.region():
                y = (x.sin() * x).exp() @ x
            y.sum().backward()


def _generator(x: Any) -> Any:
    yield x.sin()


async def _coroutine(x: Any) -> Any:
    return x.sin()


async def _asynchronous(x: Any) -> Any:
    yield x.sin()


@pytest.mark.parametrize("function", [_generator, _coroutine, _asynchronous], ids=lambda function: function.__name__)
@pytest.mark.parametrize("decorator", [actckpt.region, actckpt.offload, actckpt.checkpoint])
def test_a_function_whose_body_runs_after_its_call_is_not_decorated(decorator: Any, function: Any) -> None:
    with pytest.raises(TypeError, match="Its call returns before its body runs"):
        decorator()(function)


def test_the_blocks_that_are_named_where_none_are_found_are_some() -> None:
    assert actckpt.apply(_Rows(), blocks=torch.nn.Linear) == ("rows.0", "rows.1", "rows.2")
