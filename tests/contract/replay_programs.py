"""Run a random program plainly, with every saved tensor copied, and with its regions open."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from hypothesis import given, strategies as st
from random_programs import many_draws
from replay_operators import OPERATORS, Pool, at, fit, real
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

import actckpt

Region = Callable[[Any], Any]
POOL_LIMIT = 10
#: Regions with these policies record nothing, so that regions inside stand for themselves.
NO_TAPE = ("keep", "offload")
#: Memory of tensors that do not share a version counter. Nobody can tell when it changes after its region.
unwatched: list[Any] = []
#: These make such tensors.
SEPARATE_COUNTERS = ("data", "unsafe chunk", "unsafe split")


def no_region(policy: Any) -> Any:
    """Leave the block as it is."""
    return nullcontext()


@contextmanager
def copying_region(policy: Any) -> Iterator[None]:
    """Let backward see what each tensor was when autograd saved it, whatever became of it since."""

    def pack(tensor: Tensor) -> Any:
        alias = tensor.detach()
        storage = alias.untyped_storage().clone()
        copied = torch.empty(0, dtype=alias.dtype)
        copied.set_(storage, alias.storage_offset(), alias.shape, alias.stride())
        copied = copied.conj() if alias.is_conj() else copied
        return torch._neg_view(copied) if alias.is_neg() else copied

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def policy_of(kind: str, seed: int) -> Any:
    """Return one of the forms of a policy, with decisions that `seed` fixes."""

    def drawn(*what: Any) -> int:
        return hashlib.blake2b(repr((seed, *what)).encode()).digest()[0]

    actions = list(actckpt.Action)
    if kind == "per op":
        names = ["mul", "sin", "cos", "mm", "add", "tanh", "clone", "relu", "sigmoid"]
        names += ["copy_", "mul_", "native_dropout"]
        drawn_names = [name for name in names if drawn(name) % 4]
        of_op = {getattr(torch.ops.aten, name): actions[drawn(name, "action") % 4] for name in drawn_names}
        return actckpt.policies.PerOp(of_op, actions[seed % 4])
    if kind == "list":
        return [op for op in (torch.ops.aten.mul, torch.ops.aten.mm, torch.ops.aten.tanh) if drawn(str(op)) % 2]
    if kind == "values":
        return lambda info: actions[drawn(info.op, info.index, info.shape) % 4]
    if kind == "places":
        entries = [key for key in ("**", "aten.mul", "::tanh", "aten.mm") if drawn(key) % 3]
        return {"**": actions[seed % 4]} | {key: actions[drawn(key, "action") % 4] for key in entries}
    if kind == "torch":
        chosen = [getattr(CheckpointPolicy, name) for name in _OF_TORCH if hasattr(CheckpointPolicy, name)]
        return lambda ctx, op, *args, **kwargs: chosen[drawn(op, len(args)) % len(chosen)]
    return kind


POLICIES = (
    *("recompute", "keep", "offload", "prefer_offload", "per op", "list", "values", "torch"),
    "places",
)
#: The last two came with torch 2.11.
_OF_TORCH = ("MUST_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")


def _inner(a: Tensor, b: Tensor) -> Tensor:
    product = torch.nn.functional.dropout(a.sin() * fit(b, *a.shape), 0.3)
    return product.cos().mul_(2).tanh()


def run_body(
    body: list[Any], pool: Pool, region: Region, trace: list[Any], wanted: list[Tensor], depth: int = 0
) -> None:
    """Run a body on a pool that it changes. What an operator raises goes into the trace."""
    for kind, *rest in body:
        if kind == "region":
            policy, inner = rest
            with region(policy_of(*policy)):
                run_body(inner, pool, region, trace, wanted, depth + (policy[0] not in NO_TAPE))
        elif kind == "no grad":
            with torch.no_grad():
                run_body(rest[0], pool, region, trace, wanted, depth)
        else:
            try:
                made = _run_one(kind, rest, pool, region, wanted, depth)
            except RuntimeError as error:
                trace.append((kind, type(error).__name__))
                continue
            pool.extend(t for t in made if t.numel() and t.numel() <= 64)
            del pool[: max(0, len(pool) - POOL_LIMIT)]
        if depth == 0:
            pool[:] = [_moved(t) if t.untyped_storage() in unwatched else t for t in pool]


def _moved(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except RuntimeError:  # a view of a tensor that changed where views must not see it
        return tensor.detach().clone()


def _run_one(kind: str, numbers: list[int], pool: Pool, region: Region, wanted: list[Tensor], depth: int) -> Pool:
    a, b, c = numbers
    if kind == "drop":
        if len(pool) > 2:
            del pool[a % len(pool)]
        return []
    if kind == "checkpoint":
        arguments = at(pool, a).clone(), at(pool, b).clone()
        if region is not actckpt.region or depth == 0:
            return [_inner(*arguments)]
        inner = (torch.utils.checkpoint.checkpoint, actckpt.checkpoint)[c % 2]
        return [inner(_inner, *arguments, use_reentrant=False)]
    if kind == "grad":
        target = at(pool, a)
        if not target.requires_grad or not torch.is_grad_enabled():
            return []
        found = torch.autograd.grad(
            real(target).sum(), wanted, allow_unused=True, retain_graph=True, create_graph=bool(c % 2)
        )
        return [g for g in found if g is not None]
    is_separate = any(name in kind for name in SEPARATE_COUNTERS)
    if is_separate:  # else what was saved of it before is one thing to autograd and another one to us
        pool[a % len(pool)] = _moved(at(pool, a))
    target = at(pool, a)
    made = OPERATORS[kind](pool, a, b, c)
    if is_separate:
        unwatched.extend(t.untyped_storage() for t in (target, *([made] if isinstance(made, Tensor) else made)))
    return [made] if isinstance(made, Tensor) else list(made)


def outcome(program: list[Any], flags: tuple[bool, ...], mode: int, seed: int, region: Region) -> Any:
    """Return what a program computes: values, errors and random state of the forward, then each backward."""
    torch.manual_seed(seed)
    wanted = [torch.randn(4, 4).requires_grad_(flag) for flag in flags]
    trace: list[Any] = []
    pool = [*wanted, *(x * 1.5 for x in wanted)]
    wanted = [x for x in wanted if x.requires_grad]
    unwatched.clear()
    run_body(program, pool, region, trace, wanted)
    values = [t.data.clone() for t in pool]
    forward = (values, trace, torch.get_rng_state())
    targets = [t for t in map(_moved, pool) if t.requires_grad]
    backwards: list[Any] = []
    try:
        for grads in _backwards(targets, wanted, mode, pool):
            backwards.append(grads)
    except RuntimeError as error:
        backwards.append(error)
    return forward, backwards, torch.get_rng_state()


def _backwards(targets: Pool, wanted: Pool, mode: int, pool: Pool) -> Iterator[Any]:
    if not targets:
        return
    with torch.enable_grad():
        losses = [real(t).square().sum() for t in targets]
    if mode != 3:
        pool.clear()  # what nobody holds is freed
        targets = []
    options: Any = {"allow_unused": True}
    if mode == 0:
        yield torch.autograd.grad(sum(losses), wanted, **options)
    elif mode == 1:
        yield torch.autograd.grad(sum(losses), wanted[-1:], retain_graph=True, **options)
        yield torch.autograd.grad(sum(losses), wanted, retain_graph=True, **options)
        yield torch.autograd.grad(sum(losses), wanted, **options)
    elif mode == 2:
        first = torch.autograd.grad(sum(losses), wanted, create_graph=True, **options)
        yield [g.detach().clone() for g in first if g is not None]
        second = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
        if isinstance(second, Tensor):
            yield torch.autograd.grad(second, wanted, **options)
    elif mode == 3:
        for loss in losses[::-1]:
            yield torch.autograd.grad(loss, wanted, retain_graph=True, **options)
    else:
        while losses:  # parts of the graph die one after the other
            yield torch.autograd.grad(losses.pop(), wanted[:1], retain_graph=bool(losses), **options)


def is_same(left: Any, right: Any) -> bool:
    """Whether two nested results have the same bytes."""
    if isinstance(left, Tensor):
        if not isinstance(right, Tensor) or (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        both = [torch.cat([t.detach().resolve_conj().resolve_neg().reshape(-1)]) for t in (left, right)]
        return not left.numel() or torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8))
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


def changes_after_a_region(program: list[Any]) -> bool:
    """Whether anything runs after a region is closed: one with a tape of its own."""
    kinds = [kind for kind, *_ in program]
    if "region" in kinds[:-1]:
        return True
    outer = [rest for kind, *rest in program if kind in ("region", "no grad")]
    return any(changes_after_a_region(rest[-1]) for rest in outer if len(rest) == 1 or rest[0][0] in NO_TAPE)


def difference(program: list[Any], flags: tuple[bool, ...], mode: int, seed: int) -> str | None:
    """Return what is wrong with the regions of a program, None if nothing is."""
    plain = outcome(program, flags, mode, seed, no_region)
    copied = outcome(program, flags, mode, seed, copying_region)
    ours = outcome(program, flags, mode, seed, actckpt.region)
    raises_plainly = ("grad", "RuntimeError") in plain[0][1]
    if ("grad", "SavedTensorChangedError") in ours[0][1] and not raises_plainly:
        return None if changes_after_a_region(program) else "a backward inside the forward raised"
    if not is_same(ours[0], plain[0]) and not is_same(ours[0], copied[0]):
        # What a backward inside the forward found goes on into the program.
        is_told = any(kind == "grad" for kind, _ in ours[0][1])
        return None if is_told else f"the forward differs: it raised {ours[0][1]}, plainly {plain[0][1]}"
    for number, mine in enumerate(ours[1]):
        raises_plainly |= number < len(plain[1]) and isinstance(plain[1][number], RuntimeError)
        if isinstance(mine, RuntimeError):
            is_told = isinstance(mine, actckpt.errors.SavedTensorChangedError) and changes_after_a_region(program)
            return None if raises_plainly or is_told else f"backward {number} raised {type(mine).__name__}: {mine}"
        if raises_plainly and not is_same(ours[0], copied[0]):
            return None  # a backward inside the forward raised here as it did plainly: nothing to compare with
        expected = [run[1][number] for run in (plain, copied) if number < len(run[1])]
        if not any(is_same(mine, right) for right in expected if not isinstance(right, RuntimeError)):
            return f"gradients of backward {number} differ: {mine} is none of {expected}"
    return None


numbers = st.integers(0, 9)
names = st.sampled_from(sorted(OPERATORS))
writes = st.sampled_from(sorted(name for name in OPERATORS if name.endswith("_") or "place" in name or "of" in name))
operators = st.tuples(names | writes, numbers, numbers, numbers)
extras = st.tuples(st.sampled_from(["drop", "grad", "checkpoint"]), numbers, numbers, numbers)
policies = st.tuples(st.sampled_from(POLICIES), st.integers(0, 50))


def _around(inner: Any) -> Any:
    items = operators | extras | st.tuples(st.just("region"), policies, inner) | st.tuples(st.just("no grad"), inner)
    return st.lists(items, min_size=1, max_size=8)


bodies = st.recursive(st.lists(operators | extras, min_size=1, max_size=8), _around, max_leaves=4)
#: With at least one region.
programs = st.lists(operators | st.tuples(st.just("region"), policies, bodies), min_size=1, max_size=6).filter(
    lambda program: any(kind == "region" for kind, *_ in program)
)


def drawn_programs(test: Any) -> Any:
    """Let a test draw programs, and how they run: which tensors require grad, how backward runs, and a seed."""
    return many_draws(
        given(
            program=programs,
            flags=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
            mode=st.integers(0, 4),
            seed=st.integers(0, 3),
        )(test)
    )
