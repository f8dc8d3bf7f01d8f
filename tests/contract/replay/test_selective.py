"""Per-op policies beside torch's selective checkpointing: the same promises, without its limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from offload_oracle import store_of_kind
from oracle import BOTH, Checkpoint, CountOperators, assert_equal, leaf, mlp, ours, plain, theirs
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt
from actckpt import Action, SavedTensorInfo, _checkpointed_call
from actckpt.memory import LiveStorages

_MM = torch.ops.aten.mm.default


def _contexts(policy: Any) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, policy)


def _keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is _MM else CheckpointPolicy.PREFER_RECOMPUTE


def _program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).relu() @ w).sigmoid()


def test_torchs_policy_is_asked_what_torch_asks_it() -> None:
    asked: dict[str, list[Any]] = {}
    for name, method in BOTH.items():
        calls = asked[name] = []

        def policy(ctx: Any, op: Any, *args: Any, calls: list[Any] = calls, **kwargs: Any) -> CheckpointPolicy:
            shapes = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]
            calls.append((str(op), shapes, kwargs))
            return CheckpointPolicy.PREFER_RECOMPUTE

        model, x = mlp(dropout=0.5), leaf(3, 8)
        y = method(model, x, context_fn=_contexts(policy))
        num_in_forward = len(calls)
        y.sum().backward()
        assert name == "torch" or len(calls) == num_in_forward > 0
        del calls[num_in_forward:]
    assert asked["actckpt"] == asked["torch"]


def test_torchs_policy_sees_the_result_of_the_operator() -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is _MM:
            seen.append((ctx.is_recompute, torch.equal(ctx.op_output, torch.mm(*args))))
        return CheckpointPolicy.PREFER_RECOMPUTE

    ours(_program, leaf(4, 4), leaf(4, 4), policy=policy).sum().backward()
    assert seen == [(False, True)] * 2


@pytest.mark.parametrize("policy", [[_MM], _keep_matmuls], ids=["list", "function"])
def test_kept_operators_do_not_run_again(policy: Any) -> None:
    counts, grads = {}, {}
    for name, method in {"plain": plain, "torch": theirs, "actckpt": ours}.items():
        torch.manual_seed(3)
        x, w = leaf(4, 4), leaf(4, 4)
        options = {} if method is plain else {"context_fn": _contexts(policy)}
        y = method(_program, x, w, **options).sum()
        with CountOperators() as count:
            y.backward()
        counts[name], grads[name] = count.counts[str(_MM)], (x.grad, w.grad)
    assert counts["actckpt"] == counts["torch"] == counts["plain"]
    assert_equal(grads["actckpt"], grads["plain"])


@pytest.mark.parametrize("answer", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_cpu_offload_of_a_torch_policy_offloads_in_eager_mode(answer: str) -> None:
    if not hasattr(CheckpointPolicy, answer):
        pytest.skip(f"torch {torch.__version__} has no CheckpointPolicy.{answer}")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return getattr(CheckpointPolicy, answer) if op is _MM else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = leaf(64, 64), leaf(64, 64)
    _program(x, w).sum().backward()
    expected, x.grad, w.grad = (x.grad, w.grad), None, None
    actckpt.reset_stats()
    y = ours(_program, x, w, context_fn=_contexts(policy)).sum()
    assert actckpt.stats().offloaded_bytes >= 64 * 64 * 4
    with CountOperators() as count:
        y.backward()
    assert actckpt.stats().reloaded_bytes >= 64 * 64 * 4
    assert count.counts[str(_MM)] == 4  # of backward itself
    assert_equal((x.grad, w.grad), expected)


def test_second_and_double_backward_work_where_torchs_raise() -> None:
    def second(method: Checkpoint, **options: Any) -> Any:
        torch.manual_seed(3)
        x, w = leaf(4, 4), leaf(4, 4)
        y = method(_program, x, w, **options).sum()
        (once,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        return once, again, *torch.autograd.grad(again.square().sum(), (x, w))

    with pytest.raises(RuntimeError):
        second(theirs, context_fn=_contexts([_MM]))
    assert_equal(second(ours, context_fn=_contexts([_MM])), second(plain))


def test_an_operator_in_place_on_a_kept_result_works_where_torchs_raises() -> None:
    def in_place(method: Checkpoint, **options: Any) -> Any:
        torch.manual_seed(3)
        x, w = leaf(4, 4), leaf(4, 4)
        method(lambda x, w: ((x @ w).relu_() @ w).sigmoid(), x, w, **options).sum().backward()
        return x.grad, w.grad

    with pytest.raises(RuntimeError):
        in_place(theirs, context_fn=_contexts([_MM]))
    assert_equal(in_place(ours, context_fn=_contexts([_MM])), in_place(plain))


def _held_bytes(method: Checkpoint, program: Callable[..., torch.Tensor], *inputs: torch.Tensor, **options: Any) -> int:
    with LiveStorages() as live:
        y = method(program, *inputs, **options)
        held = live.live_bytes - y.untyped_storage().nbytes()
        y.sum().backward()
    return held


def test_results_that_backward_does_not_need_are_not_held(no_audit: None) -> None:
    x, w = leaf(64, 64), leaf(64, 64)
    program = lambda x, w: ((x @ w) + 1).mean(1)  # noqa: E731
    assert _held_bytes(theirs, program, x, w, context_fn=_contexts([_MM])) == 64 * 64 * 4
    assert _held_bytes(ours, program, x, w, context_fn=_contexts([_MM])) == 0


def test_a_small_value_is_kept_where_recomputing_it_would_hold_a_large_one(no_audit: None) -> None:
    def held(method: Checkpoint, **options: Any) -> int:
        x = leaf(256, 256)

        def step() -> torch.Tensor:
            return method(lambda hidden: hidden.mean(1).sin(), x * 2, **options)

        return _held_bytes(lambda program, *_: program(), step, x)

    assert held(theirs) == 256 * 256 * 4
    assert held(ours, policy=actckpt.policies.PerOp({})) == 256 * 4


def test_actions_of_views_change_nothing(no_audit: None) -> None:
    program = lambda x, w: (x @ w).t().sigmoid()  # noqa: E731
    expected = _held_bytes(ours, program, leaf(8, 8), leaf(8, 8), policy=actckpt.policies.PerOp({}))
    got = _held_bytes(ours, program, leaf(8, 8), leaf(8, 8), policy=[torch.ops.aten.t])
    assert got == expected == 0


def test_a_name_that_is_no_operator_raises_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no operator 'aten\.addmmm'.*aten\.addmm"):
        actckpt.region(["aten.addmmm"])


def test_a_packet_stands_for_its_overloads() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    y = ours(_program, x, w, policy=[torch.ops.aten.mm]).sum()
    with CountOperators() as count:
        y.backward()
    assert count.counts[str(_MM)] == 4


def test_a_function_of_values_is_asked_once_per_saved_value() -> None:
    asked: list[SavedTensorInfo] = []

    def policy(info: SavedTensorInfo) -> Action:
        asked.append(info)
        return Action.RECOMPUTE

    w = torch.nn.Parameter(torch.randn(4, 4))
    with actckpt.region(policy):
        y = ((leaf(4, 4) * 2) @ w).exp()  # what mul makes is saved by mm, and what exp makes by itself
    y.sum().backward()
    assert [str(info.op) for info in asked] == ["aten.mul.Tensor", "aten.exp.default"]


def test_the_inner_policy_decides_for_values_born_inside() -> None:
    x = leaf(4, 4)
    with actckpt.region("recompute") as outer:
        hidden = x.exp()
        with actckpt.region([torch.ops.aten.sin, torch.ops.aten.exp]):
            hidden = hidden.exp()
        hidden = hidden.exp()
    hidden.sum().backward()
    (row,) = [row for row in outer.report().rows if row.operator == "aten.exp.default"]
    assert (row.num_values, row.kept_bytes, row.recomputed_bytes) == (3, 64, 128)


@pytest.mark.parametrize("selective", ["context_fn", "policy"])
@pytest.mark.parametrize("respects", [None, True, False])
def test_hooks_outside_get_what_is_kept_unless_told_otherwise(selective: str, respects: bool | None) -> None:
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin()

    x, w = leaf(4, 5), leaf(5, 6)
    options = {"context_fn": _contexts([_MM])} if selective == "context_fn" else {"policy": [_MM]}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ours(function, x, w, respect_saved_tensors_hooks=respects, **options)
    assert ((4, 6) in packed) is (respects is not False)  # the product
    y.sum().backward()
    assert_equal((x.grad, w.grad), torch.autograd.grad(function(x, w).sum(), (x, w)))


def test_inputs_of_a_region_that_replays_may_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpointed_call, "DEFAULT_MIN_BYTES", 0)
    x, w = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(_program(x * 1.5, w).sum(), (x, w))
    for options in ({"context_fn": _contexts([_MM])}, {"policy": [_MM]}):
        with store_of_kind("memory"):
            before = actckpt.stats().offloaded_bytes
            y = ours(_program, x * 1.5, w, offload_inputs=True, **options).sum()
            assert actckpt.stats().offloaded_bytes > before
            assert_equal(torch.autograd.grad(y, (x, w)), expected)
