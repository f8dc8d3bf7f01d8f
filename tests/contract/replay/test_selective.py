"""Per-op policies beside torch's selective checkpointing: the same promises, without its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from internals.stores import store_of_kind
from oracle import BOTH, Checkpoint, CountOperators, assert_equal, leaf, mlp, ours, plain, theirs
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt
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


def test_torchs_policy_sees_the_result_of_each_operator() -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((ctx.is_recompute, torch.equal(ctx.op_output, op(*args, **kwargs))))
        return CheckpointPolicy.PREFER_RECOMPUTE

    ours(_program, leaf(4, 4), leaf(4, 4), policy=policy).sum().backward()
    assert seen == [(False, True)] * 4


def _step(run: Callable[..., torch.Tensor], size: int = 4) -> tuple[Any, Counter[str]]:
    """Return gradients, and the operators of backward."""
    torch.manual_seed(3)
    x, w = leaf(size, size), leaf(size, size)
    loss = run(x, w).sum()
    with CountOperators() as count:
        loss.backward()
    return (x.grad, w.grad), count.counts


def _in_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with actckpt.region(_keep_matmuls):
        return _program(x, w)


KEEPING: dict[str, Callable[..., torch.Tensor]] = {
    "torch": partial(theirs, _program, context_fn=_contexts(_keep_matmuls)),
    "contexts of a list": partial(ours, _program, context_fn=_contexts([_MM])),
    "contexts of a function": partial(ours, _program, context_fn=_contexts(_keep_matmuls)),
    "function": partial(ours, _program, policy=_keep_matmuls),
    "list of packets": partial(ours, _program, policy=[torch.ops.aten.mm]),
    "PerOp": partial(ours, _program, policy=actckpt.policies.PerOp({"aten.mm": "keep"})),
    "region": _in_region,
}


@pytest.mark.parametrize("how", KEEPING)
def test_kept_operators_do_not_run_again(how: str, no_audit: None) -> None:
    (found, counts), (expected, plainly) = _step(KEEPING[how]), _step(_program)
    assert_equal(found, expected)
    assert counts[str(_MM)] == plainly[str(_MM)]
    assert counts["aten.relu.default"] == plainly["aten.relu.default"] + 1


@pytest.mark.parametrize("answer", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_cpu_offload_of_a_torch_policy_offloads_in_eager_mode(answer: str, no_audit: None) -> None:
    if not hasattr(CheckpointPolicy, answer):
        pytest.skip(f"torch {torch.__version__} has no CheckpointPolicy.{answer}")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return getattr(CheckpointPolicy, answer) if op is _MM else CheckpointPolicy.PREFER_RECOMPUTE

    expected, plainly = _step(_program, 64)
    actckpt.reset_stats()
    found, counts = _step(partial(ours, _program, context_fn=_contexts(policy)), 64)
    # What backward needs of the second product is its sigmoid, made from it again.
    assert actckpt.stats().offloaded_bytes == 2 * 64 * 64 * 4 <= actckpt.stats().reloaded_bytes
    assert counts[str(_MM)] == plainly[str(_MM)]
    assert_equal(found, expected)


def test_an_operator_in_place_on_a_kept_result_works_where_torchs_raises(no_audit: None) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).add_(1).relu_() @ w).sigmoid()

    with pytest.raises(RuntimeError):
        _step(partial(theirs, program, context_fn=_contexts([_MM])))
    (found, counts), (expected, plainly) = _step(partial(ours, program, context_fn=_contexts([_MM]))), _step(program)
    assert_equal(found, expected)
    assert counts[str(_MM)] == plainly[str(_MM)] and counts["aten.relu_.default"] == 0


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


def test_actions_of_views_change_nothing(no_audit: None) -> None:
    program = lambda x, w: (x @ w).t().sigmoid()  # noqa: E731
    expected = _held_bytes(ours, program, leaf(8, 8), leaf(8, 8), policy=actckpt.policies.PerOp({}))
    got = _held_bytes(ours, program, leaf(8, 8), leaf(8, 8), policy=[torch.ops.aten.t])
    assert got == expected == 0


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


def test_inputs_of_a_region_that_replays_may_be_offloaded() -> None:
    x, w = leaf(8192, 32), leaf(32, 32)  # 1 MiB, which offload_inputs takes
    expected = torch.autograd.grad(_program(x * 1.5, w).sum(), (x, w))
    for options in ({"context_fn": _contexts([_MM])}, {"policy": [_MM]}):
        with store_of_kind("memory"):
            before = actckpt.stats().offloaded_bytes
            y = ours(_program, x * 1.5, w, offload_inputs=True, **options).sum()
            assert actckpt.stats().offloaded_bytes > before
            assert_equal(torch.autograd.grad(y, (x, w)), expected)
