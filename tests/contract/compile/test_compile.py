"""Under torch.compile: torch's checkpoint takes over, in one graph."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from offload_oracle import unique_saved_bytes
from oracle import CountOperators, assert_equal, in_offload, leaf, mlp, ours
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_keywords_of_the_function_and_of_checkpoint_are_passed_on() -> None:
    x, m = leaf(3, 8), leaf(3, 8)

    def function(x: torch.Tensor, *, m: torch.Tensor) -> torch.Tensor:
        return (x * m).exp()

    y = _compiled(lambda x, m: ours(function, x, m=m, use_reentrant=False, preserve_rng_state=True))(x, m)
    assert_equal(torch.autograd.grad(y.sum(), (x, m)), torch.autograd.grad(function(x, m=m).sum(), (x, m)))


@pytest.mark.parametrize("holds", ["parameters", "a closure"])
def test_compiled_code_inside_a_region_is_bit_equal_to_it_plain(holds: str) -> None:
    model, x, factor = mlp(), leaf(3, 8), leaf(3, 8)
    compiled = _compiled(model if holds == "parameters" else lambda x: (x * factor).exp())
    inputs = [x, *(model.parameters() if holds == "parameters" else [factor])]
    expected = torch.autograd.grad(compiled(x).sum(), inputs)
    for _ in range(3):
        assert_equal(torch.autograd.grad(ours(compiled, x).sum(), inputs), expected)


@actckpt.offload(min_bytes=0)
def _decorated(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize("kind", ["context", "decorator", "applied model"])
def test_offloading_inside_a_compiled_function_moves_and_is_bit_equal(kind: str) -> None:
    """The graph breaks; the hooks themselves are not compiled, which would warn."""
    model, x = torch.nn.Sequential(mlp(), mlp(), torch.nn.Linear(8, 2)), leaf(64, 8)
    ways = {"context": in_offload(), "decorator": _decorated, "applied model": lambda model, x: model(x)}
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x * 2).cos().sum(), inputs)
    if kind == "applied model":
        actckpt.apply(model, policy="offload", min_bytes=0)
    compiled = torch.compile(lambda x: ways[kind](model, x * 2).cos(), backend="aot_eager")
    for _ in range(3):
        actckpt.reset_stats()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            y = compiled(x)
        assert not [warning for warning in warned if "actckpt" in str(warning.message)]
        assert actckpt.stats().offloaded_bytes > 0
        assert_equal(torch.autograd.grad(y.sum(), inputs), expected)


def test_a_budget_says_that_it_makes_no_plan_for_a_compiled_model() -> None:
    model = torch.nn.Sequential(mlp(), mlp(), torch.nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    called = _compiled(model)
    actckpt.apply(model, activation_budget="60%")
    for number, rows in enumerate((64, 64, 32, 16)):  # other sizes are compiled again
        x = leaf(rows, 8)
        expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gradients = torch.autograd.grad(called(x).sum(), [x, *model.parameters()])
        told = [warning for warning in warned if "no plan for the budget" in str(warning.message)]
        assert len(told) == (number == 0)
        assert_equal(gradients, expected)
    assert actckpt.report(model).plan is None
    actckpt.remove(model)  # with the meter of the last step


def test_the_budget_of_the_compiler_that_the_warning_names_saves_less() -> None:
    x, held = leaf(64, 8), {}
    for share in (1.0, 0.5, 0.0):
        model = mlp()
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=share):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            held[share] = unique_saved_bytes(lambda: compiled(x), [x, *model.parameters()])[1]  # noqa: B023 called here
    assert held[1.0] > held[0.5] > held[0.0], held


class _CountCompiled(CountOperators):
    """The same, and compiled code stays compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


_ADDMM = torch.ops.aten.addmm


class _Policy:
    """A policy in torch's form that is an object, with a method that is another one."""

    def __init__(self, chosen: Any = True, other: Any = False) -> None:
        self.chosen, self.other = chosen, other

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.chosen if op == _ADDMM.default else self.other

    def method(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self(ctx, op)


_KEEP_ADDMM: dict[str, Any] = {
    "overloads": [_ADDMM.default],
    "packet": [_ADDMM],
    "name": ["aten.addmm"],
    "tuple": (_ADDMM, "aten.mm"),
    "set": {_ADDMM.default},
    "higher-order operator": [_ADDMM.default, torch.ops.higher_order.flex_attention],
    "PerOp": actckpt.policies.PerOp({"aten.addmm": "keep"}),
    "PerOp that keeps the rest": actckpt.policies.PerOp({"aten.gelu": "recompute"}, default="keep"),
    "keep": "keep",
    "Action": actckpt.Action.KEEP,
    "preset": "matmuls",
    "function": lambda ctx, op, *args, **kwargs: op == _ADDMM.default,
    "partial": partial(lambda kept, ctx, op, *args, **kwargs: op == kept, _ADDMM.default),
    "object": _Policy(),
    "method": _Policy().method,
}


@pytest.mark.parametrize("way", ["checkpoint", "apply"])
@pytest.mark.parametrize("policy", _KEEP_ADDMM)
def test_a_policy_by_operator_is_followed_in_one_graph_whatever_its_form(policy: str, way: str) -> None:
    model, x = torch.nn.Sequential(mlp(), mlp()), leaf(3, 8)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    called = lambda x: ours(model, x, policy=_KEEP_ADDMM[policy])  # noqa: E731
    if way == "apply":
        assert actckpt.apply(model, policy=_KEEP_ADDMM[policy]) == ("0", "1")
        called = model
    compiled = _compiled(called)
    if policy in ("object", "method") and torch.__version__ < (2, 10):  # its compiler takes none, for torch neither
        with pytest.raises(Exception, match=r"actckpt\.checkpoint: torch\.compile of torch 2\.9\S* takes no .* Pass a"):
            compiled(x)
        compiled = torch.compile(called, backend="aot_eager")
        assert_equal(torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()]), expected)
        return
    with _CountCompiled() as count:
        assert_equal(torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()]), expected)
    assert count.counts["aten.addmm.default"] == 4  # none in backward


@pytest.mark.parametrize(
    "policy", [None, "recompute", actckpt.Action.RECOMPUTE, [], actckpt.policies.PerOp({})], ids=str
)
def test_a_policy_that_recomputes_all_recomputes_in_the_compiled_backward(policy: Any) -> None:
    model, x = torch.nn.Sequential(mlp(), mlp()), leaf(3, 8)
    compiled = _compiled(lambda x: ours(model, x, policy=policy))
    if policy is None:
        actckpt.apply(model)
        compiled = _compiled(model)
    with _CountCompiled() as count:
        compiled(x).sum().backward()
    assert count.counts["aten.addmm.default"] == 8  # four in forward, four in backward


def test_another_policy_per_operator_compiles_another_graph() -> None:
    model, x = torch.nn.Sequential(mlp(), mlp()), leaf(3, 8)
    policies = [actckpt.policies.PerOp({"aten.addmm": "keep"}), actckpt.policies.PerOp({"aten.gelu": "keep"})]
    policies += [actckpt.policies.PerOp({}, default="keep")]
    chosen: list[Any] = [None]
    compiled = _compiled(lambda x: ours(model, x, policy=chosen[0]))
    for chosen[0], num_calls in zip([*policies, *policies], [4, 8, 4] * 2, strict=True):
        with _CountCompiled() as count:
            compiled(x).sum().backward()
        assert count.counts["aten.addmm.default"] == num_calls


#: Where torch has no such policy, the tests of it are skipped.
_moves = _Policy(getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None), CheckpointPolicy.PREFER_RECOMPUTE)


def _moving(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    found: CheckpointPolicy = _moves(ctx, op)
    return found


#: No compiler of torch 2.13 reads the tag for offloading: the value would be kept or recomputed, without a warning.
_MOVES = r"actckpt\.checkpoint: .*torch\.compile of torch \S+ moves nothing: keep or"
_BY_VALUE = r"actckpt\.checkpoint: this policy cannot be honoured .* a PerOp of keep and"
_UNKNOWN = r"cannot be honoured|not supported"
_RAISING: dict[str, tuple[str, dict[str, Any]]] = {
    "use_reentrant": (_UNKNOWN, {"use_reentrant": True}),
    "rng_trackers": (_UNKNOWN, {"rng_trackers": [object]}),
    "Action": (_MOVES, {"policy": actckpt.Action.OFFLOAD}),
    "PerOp": (_MOVES, {"policy": actckpt.policies.PerOp({"aten.addmm": "offload"})}),
    "PerOp default": (_MOVES, {"policy": actckpt.policies.PerOp({}, default="prefer_offload")}),
    "moving function": (_MOVES, {"policy": _moving}),
    "moving object": (_MOVES, {"policy": _moves}),
    "moving context_fn": (_MOVES, {"context_fn": partial(create_selective_checkpoint_contexts, _moving)}),
    "values": (_BY_VALUE, {"policy": lambda info: "keep"}),
    "values, a default": (_BY_VALUE, {"policy": lambda info, limit=3: "keep"}),
    "values, a partial": (_BY_VALUE, {"policy": partial(lambda limit, info: "keep", 3)}),
    "name": (_BY_VALUE, {"policy": "prefer_offload"}),
}


@pytest.mark.parametrize("keywords", _RAISING)
def test_what_cannot_be_honoured_raises_one_line_that_names_actckpt(keywords: str) -> None:
    if keywords.startswith("moving") and not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):
        pytest.skip(f"torch {torch.__version__} has no MUST_CPU_OFFLOAD")
    message, options = _RAISING[keywords]
    model, x = mlp(), leaf(3, 8)
    with pytest.raises(Exception, match=message):
        _compiled(lambda x: ours(model, x, **options))(x)


def test_what_prefers_to_be_moved_compiles_as_in_torch() -> None:
    model, x = mlp(), leaf(3, 8)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return getattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD", CheckpointPolicy.PREFER_SAVE)

    compiled = _compiled(lambda x: ours(model, x, policy=policy))
    assert_equal(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(model(x).sum(), x))


@pytest.mark.parametrize("policy", ["offload", actckpt.policies.PerOp({"aten.addmm": "offload"})], ids=str)
def test_where_the_graph_may_break_a_policy_that_moves_runs_eagerly_and_moves(policy: Any) -> None:
    model, x = mlp(width=512), leaf(1024, 512)
    expected = torch.autograd.grad(model(x).sum(), x)
    actckpt.reset_stats()
    y = torch.compile(lambda x: ours(model, x, policy=policy), backend="aot_eager")(x)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)
    assert actckpt.stats().offloaded_bytes > 0
