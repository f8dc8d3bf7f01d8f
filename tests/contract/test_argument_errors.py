"""Arguments that are nearly right: taken where their meaning is plain, else refused where they were written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt import config


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))


def test_per_op_refuses_a_list_and_says_where_it_goes() -> None:
    operators: Any = ["aten.mm"]
    with pytest.raises(ValueError, match=r"^PerOp: .* is a list\. Pass a dict .*; .* itself as policy\.$"):
        actckpt.policies.PerOp(operators)


@pytest.mark.parametrize("wrong", ["x", 0, []])
def test_report_explains_tensors_only(wrong: Any) -> None:
    with actckpt.region() as region:
        torch.ones(2, requires_grad=True).exp()
    with pytest.raises(TypeError, match="takes a tensor of the region"):
        region.report(explain=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "offload", "min_bytes": "x"}, "min_bytes"),
        ({"policy": "offload", "to": "dsk"}, "to='dsk' is not a store"),
        ({"use_reentrant": True}, "use_reentrant=True is not supported"),
        ({"determinism_check": "no"}, "determinism_check should be one of"),
        ({"policy": "matmuls", "context_fn": lambda: None}, "policy= and context_fn= both say"),
    ],
)
def test_apply_checks_options_before_it_patches(options: dict[str, Any], message: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=message):
        actckpt.apply(model, **options)
    assert actckpt.apply(model) == ("0", "1")  # nothing was patched


@pytest.mark.parametrize("member", list(CheckpointPolicy), ids=lambda member: member.name)
def test_a_torch_policy_value_is_answered_with_the_action_it_stands_for(member: CheckpointPolicy) -> None:
    name = {"SAVE": "KEEP", "RECOMPUTE": "RECOMPUTE", "CPU_OFFLOAD": "OFFLOAD"}[member.name.partition("_")[2]]
    name = "PREFER_OFFLOAD" if member.name == "PREFER_CPU_OFFLOAD" else name
    message = rf"^policy=CheckpointPolicy\.{member.name} .* Pass actckpt\.Action\.{name}, or a function"
    with pytest.raises(ValueError, match=message):
        actckpt.checkpoint(torch.exp, torch.ones(2, requires_grad=True), policy=member)


@pytest.mark.parametrize("answer", ["keep", "recompute"])
def test_a_policy_function_may_return_the_name_of_an_action(answer: Any) -> None:
    x = torch.rand(8, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with actckpt.region(lambda info: answer) as region:
        y = x.exp().sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
    assert (region.report().recomputed_bytes > 0) == (answer == "recompute")


def test_a_policy_function_may_not_return_another_text() -> None:
    wrong: Any = "kep"
    with (
        pytest.raises(ValueError, match=r"The policy returned 'kep', a str, .* or one of 'keep', "),
        actckpt.region(lambda info: wrong),
    ):
        torch.ones(2, requires_grad=True).exp()


def test_a_misspelt_keyword_of_the_decorator_is_answered_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"keyword 'use_reentrent'.* Did you mean use_reentrant\?$"):
        actckpt.checkpoint(use_reentrent=False)
    with pytest.raises(ValueError, match=r"keyword 'budget'.* actckpt\.apply\(model, budget=\.\.\.\)\.$"):
        actckpt.checkpoint(budget="1GiB")
    sequential: Any = actckpt.checkpoint_sequential
    with pytest.raises(ValueError, match=r"arguments budget\..* actckpt\.apply\(model, budget=\.\.\.\)\.$"):
        sequential(_model(), 2, torch.ones(2, 4), budget="1GiB")


def test_the_decorator_checks_its_keywords_before_it_has_a_function() -> None:
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        actckpt.checkpoint(use_reentrant=True)
    with pytest.raises(ValueError, match="determinism_check"):
        actckpt.checkpoint(determinism_check="sometimes")


_ADDMM = torch.ops.aten.addmm


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (_ADDMM, r"^policy is one operator, aten\.addmm\. Pass a list .*: policy=\[torch\.ops\.aten\.addmm\]\.$"),
        (_ADDMM.default, r"one operator, aten\.addmm\.default\. .* policy=\[torch\.ops\.aten\.addmm\.default\]"),
        (torch.ops.higher_order.flex_attention, "^policy is one operator, flex_attention"),
        (torch.nn.Linear, r"^policy is a class, Linear\. .* actckpt\.apply\(model, blocks="),
        (torch.nn.Linear(2, 2).forward, r"^policy is the forward of a Linear\. .* actckpt\.region\(\)\(module\)"),
        (torch.zeros(2), r"^policy is a tensor of shape \(2,\)\. .* with actckpt\.region\(\)"),
        (torch.mm, "^policy is a function of torch, mm. Pass a list"),
        (torch.nn.functional.linear, "^policy is a function of torch, linear. Pass a list"),
        ("aten.mm", r"^policy='aten\.mm' names an operator\. Pass a list of the operators to keep: \['aten\.mm'\]"),
        ("mm", r"^policy='mm' names an operator\. Pass a list of the operators to keep: \['aten\.mm'\]"),
        ("KEEP", "is not an action.* Did you mean 'keep'"),
        ("full", r"^policy='full' is not an action.* Did you mean 'recompute'\?$"),
        ("selective", r"Did you mean 'matmuls'\?$"),
        ("none", r"Did you mean 'keep'\?$"),
        ("40%", r"^policy='40%' is a budget\. Pass activation_budget='40%' in the place of the policy\.$"),
        ("70 GiB", r"is a budget\. Pass budget='70 GiB' in"),
        ("1.5GiB", r"is a budget\. Pass budget='1\.5GiB' in"),
        ("auto", r"is a budget\. Pass budget='auto' in"),
        ("Action.OFFLOAD", "is not an action.* Did you mean 'offload'"),
    ],
)
def test_what_is_nearly_a_policy_is_refused_with_the_policy_that_was_meant(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        actckpt.region(policy)
    with pytest.raises(ValueError, match=message):
        actckpt.checkpoint(torch.exp, torch.ones(2, requires_grad=True), policy=policy)
    with pytest.raises(ValueError, match=message):
        actckpt.apply(_model(), policy=policy)


def test_a_method_of_a_module_may_be_a_policy() -> None:
    class Net(torch.nn.Module):
        def policy(self, info: actckpt.SavedTensorInfo) -> actckpt.Action:
            return actckpt.Action.RECOMPUTE

    with actckpt.region(Net().policy) as region:
        torch.ones(2, requires_grad=True).exp().sin()
    assert region.report().recomputed_bytes > 0


@pytest.mark.parametrize("function", [actckpt.apply, actckpt.remove, actckpt.report])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model is a NoneType, not a module. Pass the model itself"),
        (_model().forward, "model is a method, not a module. Pass the Sequential that it belongs to"),
        (_model().parameters(), "model is a generator, not a module. Pass the model itself"),
        (list(_model()), "model is a list, not a module. Pass the model itself"),
        (torch.nn.Linear, "model is the class Linear, not a module. Pass the model itself"),
    ],
)
def test_what_is_no_model_is_refused_by_its_kind(function: Any, model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{function.__name__}: {message}.*actckpt.{function.__name__}"):
        function(model)


def test_blocks_by_a_name_that_is_not_there_are_answered_with_names_that_are() -> None:
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"no module .* is named '9'; it has 6\. The first: 0, 0\.0, 0\.1"
    ):
        actckpt.apply(_model(), blocks=["9"])
    wrong: Any = [1]
    with pytest.raises(actckpt.errors.BlocksError, match=r"blocks=1 is a int.* \(texts, also for numbers"):
        actckpt.apply(_model(), blocks=wrong)


def test_checkpoint_of_the_result_of_a_call_says_how_to_pass_it() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    result: Any = layer(x)
    with pytest.raises(
        TypeError, match=r"a tensor of shape \(2, 4\) is not a function\. Pass it uncalled.*\(layer, x\)"
    ):
        actckpt.checkpoint(result)
    swapped: Any = x
    with pytest.raises(TypeError, match=r"a tensor .* is not a function\. The function comes first: .*\(layer, x\)"):
        actckpt.checkpoint(swapped, layer)


def _with_policies(x: torch.Tensor, *, policies: int, min_bytes: int = 0, budget: int = 0) -> torch.Tensor:
    return x * policies + budget


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"polcy": "keep"}, r"neither checkpoint nor Linear has a keyword 'polcy'\. Did you mean policy\?"),
        ({"presrve_rng_state": False}, r"keyword 'presrve_rng_state'\. Did you mean preserve_rng_state\?"),
        ({"policy": "offload", "min_bytes": "1KiB"}, r"keyword 'min_bytes'\. .* with actckpt\.offload\(min_bytes="),
        ({"budget": "1GiB"}, r"keyword 'budget'\. A budget is one of a model, .*: actckpt\.apply\(model, budget="),
        ({"activaton_budget": "50%"}, r"'activaton_budget'\. .*: actckpt\.apply\(model, activation_budget="),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_misspelt_keyword_is_answered_with_the_right_one(keywords: dict[str, Any], message: str, grad: bool) -> None:
    with pytest.raises(TypeError, match=message), torch.set_grad_enabled(grad):
        actckpt.checkpoint(torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True), **keywords)


@pytest.mark.parametrize(
    "function", [_with_policies, lambda x, **keywords: _with_policies(x, **keywords)], ids=["named", "any"]
)
def test_keywords_that_the_function_takes_go_to_it_whatever_they_are_like(function: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    assert actckpt.checkpoint(function, x, policies=3, min_bytes=1).sum() == 6
    assert actckpt.checkpoint(function, x, policies=3, policy="keep", budget=1).sum() == 8


def test_a_keyword_that_is_like_none_of_ours_is_answered_by_the_function() -> None:
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument 'blocks'"):
        actckpt.checkpoint(torch.nn.Linear(4, 4), torch.ones(2, 4), blocks=3)


def test_offload_of_a_model_says_how_to_run_it_so() -> None:
    for wrong in (_model(), _model().forward):
        to: Any = wrong
        message = (
            r"^offload: to is a \w+, not a store\. .* with actckpt\.offload\(\): .*\.apply\(model, policy='offload'\)"
        )
        with pytest.raises(ValueError, match=message):
            actckpt.offload(to)


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
    before = config.settings().audit
    actckpt.configure(audit=audit)
    try:
        for _ in range(3):
            x = torch.rand(8, 8, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
                with actckpt.region():
                    y = (x.sin() * x).exp() @ x
                y.sum().backward()
    finally:
        actckpt.configure(audit=before)


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


@pytest.mark.parametrize("wrong", [3, None, (torch.enable_grad(),)])
def test_a_context_fn_that_does_not_return_a_pair_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^checkpoint: context_fn returned .* two context managers"):
        actckpt.checkpoint(torch.exp, torch.ones(2, requires_grad=True), context_fn=lambda: wrong)


@pytest.mark.parametrize("wrong", [_model, [3], ["get_cuda_rng_tracker"]])
def test_rng_trackers_that_are_no_list_of_functions_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^checkpoint: rng_trackers=.* a list of functions that return trackers"):
        actckpt.checkpoint(torch.exp, torch.ones(2, requires_grad=True), rng_trackers=wrong)


@pytest.mark.parametrize("decorator", [actckpt.checkpoint(), actckpt.offload()], ids=["checkpoint", "offload"])
def test_what_cannot_be_called_cannot_be_decorated(decorator: Any) -> None:
    with pytest.raises(TypeError, match=r"5 is not a function to decorate\. Put @actckpt\."):
        decorator(5)


def test_errors_of_sizes_name_the_call() -> None:
    with pytest.raises(ValueError, match=r"^configure: host_limit='3 apples' is not a size"):
        actckpt.configure(host_limit="3 apples")
    with pytest.raises(ValueError, match=r"^offload: min_bytes='3 apples' is not a size"):
        actckpt.offload(min_bytes="3 apples")


def test_options_of_offload_are_named_as_such_where_another_policy_gets_them() -> None:
    with pytest.raises(ValueError, match=r"unknown option min_bytes for policy='recompute'\. With policy='offload' it"):
        actckpt.apply(_model(), min_bytes=1)
    other: dict[str, Any] = {"early_stop": True, "policy": "offload"}
    with pytest.raises(
        ValueError, match=r"unknown option early_stop for .*'offload'\. With other policies it is one\."
    ):
        actckpt.apply(_model(), **other)
    other = {"race": False}
    with pytest.raises(
        ValueError, match=r"option race for .*\. With a budget in place of a policy it is one\. Known: "
    ):
        actckpt.apply(_model(), **other)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"activaton_budget": "50%"}, "activation_budget"),
        ({"budgt": "1GiB"}, "budget"),
        ({"polcy": "keep"}, "policy"),
        ({"blcks": "0"}, "blocks"),
        ({"min_byte": 1}, "min_bytes"),
        ({"min_byte": 1, "policy": "offload"}, "min_bytes"),
        ({"budget": "1GiB", "optimzer": None}, "optimizer"),
        ({"min_bytes": 1, "activaton_budget": "50%"}, "activation_budget"),
    ],
)
def test_a_misspelt_option_of_apply_is_answered_with_the_right_one(options: dict[str, Any], meant: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown option .*\. Did you mean {meant}\? Known: .*activation_budget, bu"):
        actckpt.apply(_model(), **options)


def test_a_misspelt_setting_is_answered_with_the_right_one() -> None:
    setting: dict[str, Any] = {"spil_dir": "x"}
    with pytest.raises(ValueError, match=r"unknown setting spil_dir\. Did you mean spill_dir\? Known: "):
        actckpt.configure(**setting)


def _plan() -> actckpt.Plan:
    block = {"forward_s": 1.0, "backward_s": 2.0, "working_set_bytes": 8, "values": []}
    return actckpt.planner.solve({"version": 1, "classes": {"b": block}, "stack": ["b"]}, budget=2**20)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("/tmp/plan.json", r"^policy='/tmp/plan\.json' is a path\. .*actckpt\.Plan\.load\('/tmp/plan\.json'\)"),
        ("plan.json", r"^policy='plan\.json' is a path\. .*actckpt\.Plan\.load\('plan\.json'\)"),
        (Path("plan.json"), r"^policy is a path\. .*actckpt\.Plan\.load\('plan\.json'\)"),
        (_plan().to_dict(), r"^policy is a plan as plain data\. .*actckpt\.Plan\.from_dict"),
    ],
    ids=["path", "name", "Path", "dict"],
)
def test_a_plan_that_was_kept_is_answered_with_how_to_run_it(policy: Any, message: str) -> None:
    for call in (actckpt.region, lambda policy: actckpt.apply(_model(), policy=policy)):
        with pytest.raises(ValueError, match=message):
            call(policy)


def test_a_plan_is_no_policy_of_a_region() -> None:
    plan: Any = _plan()
    with pytest.raises(ValueError, match=r"^policy is a Plan, which .*: actckpt\.apply\(model, policy=plan\)\.$"):
        actckpt.region(plan)


@pytest.mark.parametrize("name", ["budget", "activation_budget"])
def test_a_plan_is_no_budget(name: str) -> None:
    model = _model()
    steps: list[None] = []

    def plan(model: torch.nn.Module, **options: Any) -> actckpt.Plan:
        return actckpt.plan(lambda: steps.append(None), model=model, **options)

    for call in (actckpt.apply, plan):
        with pytest.raises(ValueError, match=rf"^{name} is a Plan, .*: actckpt\.apply\(model, policy=plan\)\.$"):
            call(model, **{name: _plan()})
        with pytest.raises(ValueError, match=rf"^{name}='plan\.json' is a path.*actckpt\.Plan\.load\('plan\.json'\)"):
            call(model, **{name: "plan.json"})
    assert not steps, "nothing is measured before"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["x0"], r"^pins=\['x0'\] is a list, not a dict\. Pass actions by names of values"),
        ("keep", r"^pins='keep' is a str, not a dict\."),
        ({"x0": "kep"}, r"^pins: 'x0' is 'kep'\. Pass one of .* Did you mean 'keep'\?$"),
        ({"x0": ["keep"]}, r"^pins: 'x0' is \['keep'\]\. Pass one of keep, recompute, offload\."),
    ],
)
def test_pins_that_are_none_are_refused_at_the_call(pins: Any, message: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=message):
        actckpt.apply(model, activation_budget="50%", pins=pins)
    with pytest.raises(ValueError, match=message):
        actckpt.plan(lambda: pytest.fail("the step ran"), model=model, activation_budget="50%", pins=pins)
    with pytest.raises(actckpt.errors.BlocksError):
        actckpt.remove(model)


class _Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_Rows(), r"stand in a row\. Pass blocks=: .*\(Linear, of which there are 3\).*'rows\.0', 'rows\.1'"),
        (torch.nn.LSTM(4, 4, 2), r"no modules inside that are called: give apply the model around it"),
    ],
)
def test_a_model_without_repeated_blocks_is_told_what_to_pass(model: torch.nn.Module, words: str) -> None:
    with pytest.raises(actckpt.errors.BlocksError, match=rf"^apply: found no repeated blocks .*{words}") as raised:
        actckpt.apply(model)
    assert "\n" not in str(raised.value)


def test_the_blocks_that_are_named_where_none_are_found_are_some() -> None:
    assert actckpt.apply(_Rows(), blocks=torch.nn.Linear) == ("rows.0", "rows.1", "rows.2")


def test_what_cannot_be_cut_into_segments_is_one_clear_line() -> None:
    model, x = _model(), torch.ones(2, 4)
    sequential: Any = actckpt.checkpoint_sequential
    with pytest.raises(TypeError, match=r"^checkpoint_sequential: functions is a int\. Pass a Sequential or a list of"):
        sequential(2, model, x)
    with pytest.raises(
        ValueError, match=r"^checkpoint_sequential: segments='2' does not fit \d+ functions\. Pass a num"
    ):
        sequential(model, "2", x)


def test_a_class_of_modules_is_no_function_to_checkpoint() -> None:
    wrong: Any = torch.nn.Linear
    for keywords in ({}, {"bias": True}):
        with pytest.raises(TypeError, match=r"^checkpoint: Linear is a class of modules.*checkpoint\(layer, x\) with"):
            actckpt.checkpoint(wrong, 4, 4, **keywords)


@pytest.mark.parametrize("name", ["plan", "compare"])
def test_a_model_without_memory_cannot_be_measured(name: str) -> None:
    with torch.device("meta"):
        model = _model()
    call: Any = getattr(actckpt, name)
    options: dict[str, Any] = {"activation_budget": "50%"} if name == "plan" else {}
    with pytest.raises(
        ValueError, match=rf"^{name}: parameter '0\.0\.weight' is on the meta device.*actckpt\.estimate"
    ):
        call(lambda: pytest.fail("the step ran"), model=model, **options)


def test_a_race_is_on_or_off() -> None:
    wrong: Any = "no"
    with pytest.raises(ValueError, match=r"^apply: race='no'\. Pass True or False\."):
        actckpt.apply(_model(), activation_budget="50%", race=wrong)
    with pytest.raises(ValueError, match=r"^plan: race='no'\. Pass True or False\."):
        actckpt.plan(lambda: pytest.fail("the step ran"), model=_model(), activation_budget="50%", race=wrong)


def test_what_is_applied_already_or_not_is_one_line() -> None:
    model = _model()
    for call in (actckpt.remove, actckpt.report):
        with pytest.raises(
            actckpt.errors.BlocksError, match=r"is checkpointed\. Call \w+ on the model that was given to actckpt"
        ):
            call(model)
    actckpt.apply(model)
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"^apply: .* checkpointed already, .*\. Call actckpt\.remove"
    ) as raised:
        actckpt.apply(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("budget", [{"budget": "1GiB"}, {"activation_budget": "50%"}])
def test_a_plan_of_what_is_no_model_is_refused_by_its_kind(budget: dict[str, Any]) -> None:
    wrong: Any = [_model()]
    with pytest.raises(TypeError, match=r"^plan: model is a list, not a module\. Pass the model itself"):
        actckpt.plan(lambda: None, model=wrong, **budget)
