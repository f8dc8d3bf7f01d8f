"""Inference tensors have no version counter. Gradients are right all the same, or it raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from input_routes import ROUTES
from oracle import Checkpoint, SavingSquare, assert_equal, in_offload, in_region, plain
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import actckpt
from actckpt.policies import PerOp

_aten = torch.ops.aten

POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "list": [_aten.sin.default],
    "keep what reads it": [_aten.add.Tensor, _aten.cat.default],
    "offload": PerOp({_aten.sin.default: "offload"}, default="recompute"),
    "keep all by value": lambda info: actckpt.Action.KEEP,
    "recompute all by value": lambda info: actckpt.Action.RECOMPUTE,
}


@pytest.fixture(params=["first", "off"])
def _audit(request: Any) -> None:
    actckpt.configure(audit=request.param)


def inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.randn(*shape)


@torch.inference_mode()
def change(t: Tensor) -> None:
    t.add_(1)


# Replay


def _written_inside(x: Tensor, t: Tensor) -> Tensor:
    first = (x + t).sin()
    change(t)
    return first + t


def _copied(x: Tensor, t: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    buffer[:1], buffer[1:] = t[:1], t[1:]
    return x + buffer


def _made_inside(x: Tensor, t: Tensor) -> Tensor:
    with torch.inference_mode():
        made = t * 2
        made.add_(x.detach())
    made_inside.append(made)
    return x + made


def _statistics_in_inference_mode(x: Tensor, t: Tensor) -> Tensor:
    mean = torch.zeros(4)
    y = (x + mean).sin().exp()
    with torch.inference_mode():
        torch.nn.functional.batch_norm(x.detach(), mean, torch.ones(4), training=True)
        torch.nn.functional.instance_norm(x.detach()[None], mean[:3], torch.ones(3), use_input_stats=True)
    return y * (x + mean)


def _frozen(x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        features = (t @ t.T).relu()
    return (x.T @ features).sin().exp() + (x.T + t.T).sin()


made_inside: list[Tensor] = []
#: What is made of a tensor and an inference tensor, before a sine and an exponential of it.
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, t: x + t,
    "of a view": lambda x, t: x + t[0].expand(3, 4),
    "by keyword": lambda x, t: torch.add(x.cos(), other=t, alpha=2),
    "in a list": lambda x, t: torch.cat([x.cos(), t]),
    "in place": lambda x, t: x.cos().add_(t),
    "copied": _copied,
    "from it alone": lambda x, t: x * (t * 2).cos(),
    "written inside": _written_inside,
    "made inside": _made_inside,
    "statistics in inference mode": _statistics_in_inference_mode,
    "frozen": _frozen,
}


def _gradient(program: str, region: Any) -> list[Tensor]:
    """Run a program, change the inference tensors that it read, and return gradients, twice."""
    torch.manual_seed(3)
    x, t = torch.randn(3, 4, requires_grad=True), inference(3, 4)
    made_inside.clear()
    with region():
        y = PROGRAMS[program](x, t).sin().exp()
    for tensor in (t, *made_inside):
        change(tensor)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    change(t)
    return [y.detach(), *first, *torch.autograd.grad(y.sum(), x)]


@pytest.mark.usefixtures("_audit")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_replayed_from_inference_tensors_that_changed_is_what_the_forward_had(
    program: str, policy: str
) -> None:
    expected = _gradient(program, nullcontext)
    for _ in range(3):
        assert_equal(_gradient(program, functools.partial(actckpt.region, POLICIES[policy])), expected)


def test_the_report_says_what_is_kept_on_account_of_an_inference_tensor() -> None:
    x, t = torch.randn(3, requires_grad=True), inference(3)
    with actckpt.region() as r:
        y = (x + t).sin().exp()
    rows = {row.operator: row for row in r.report().rows}
    assert rows["aten.add.Tensor"].not_replayed == {"made from an inference tensor, which has no version counter": 1}
    assert rows["aten.exp.default"].recomputed_bytes == 12
    y.sum().backward()


def test_an_inference_tensor_on_memory_that_was_seen_before_is_noticed() -> None:
    x, t = torch.randn(3, requires_grad=True), inference(3)
    same = torch.empty(0).set_(t.untyped_storage(), 0, (3,))
    with actckpt.region():
        y = (x + same).sin()
        z = (y + t).sin()
    expected = (y + t).cos().detach()
    change(t)
    assert_equal(torch.autograd.grad(z, y, torch.ones(3))[0], expected)


@pytest.mark.parametrize("method", [actckpt.checkpoint, in_region()], ids=["rerun", "replay"])
def test_a_backward_in_inference_mode_is_as_plain(method: Checkpoint) -> None:
    def gradient(run: Checkpoint) -> Tensor:
        torch.manual_seed(0)
        x = torch.arange(3.0, requires_grad=True)
        y = run(lambda x: torch.nn.functional.dropout(x.sin().exp(), 0.5).cos(), x).sum()
        with torch.inference_mode():
            return torch.autograd.grad(y, x)[0].clone()

    assert_equal(gradient(method), gradient(plain))


class _ChangesWhatItSaved(SavingSquare):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = 2 * x * grad
        x.zero_()
        return result


def test_a_backward_in_inference_mode_that_changes_what_it_unpacked_spoils_nothing_else() -> None:
    x = torch.arange(3.0, requires_grad=True)
    with actckpt.region():
        h = x.exp()
        y = h.sin() + _ChangesWhatItSaved.apply(h)
    with torch.inference_mode():
        (found,) = torch.autograd.grad(y, x, torch.ones(3))
    assert_equal(found.clone(), ((x.exp().cos() + 2 * x.exp()) * x.exp()).detach())


# Rerun


def _read(x: Tensor, held: Tensor) -> Tensor:
    return (x + held).sin().exp()


class AsModule(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Tensor] = _read) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return self.function(x, held)


def _changing_it(x: Tensor, t: Tensor) -> Tensor:
    change(t)
    return _read(x, t)


class _Biased(torch.nn.Module):
    def __init__(self, bias: torch.nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return _read(x, self.bias)


def _in_a_parameter(run: Any, x: Tensor, t: Tensor) -> Tensor:
    with torch.inference_mode():
        module = _Biased(torch.nn.Parameter(t.clone()))
    made_inside.append(module.bias)
    return run(module, x)


def _read_first(x: Tensor, held: Sequence[Tensor]) -> Tensor:
    return _read(x, held[0])


PLACES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    **{name: functools.partial(lambda route, run, x, t: route(run, _read, x, t), ROUTES[name]) for name in ROUTES},
    "argument of a module": lambda run, x, t: run(AsModule(), x, t),
    "tuple of a module": lambda run, x, t: run(AsModule(_read_first), x, (t,)),
    "list that others have": lambda run, x, t: run(_read_first, x, _shared_list(t)),
    "view": lambda run, x, t: run(AsModule(), x, t[:1]),
    "expanded": lambda run, x, t: run(AsModule(), x, t[:1].expand(3, 4)),
    "changed by the function": lambda run, x, t: run(AsModule(_changing_it), x, t),
    "changed by a function": lambda run, x, t: run(_changing_it, x, t),
    "a parameter": _in_a_parameter,
}
del PLACES["global of another function"]  # not checked
_shared: list[Any] = []


def _shared_list(t: Tensor) -> list[Tensor]:
    _shared.append([t])
    return _shared[-1]


def _of_cosine(around: Checkpoint, run: Checkpoint) -> Checkpoint:
    """Run a function of a cosine inside of something."""
    return lambda function, x, *args, **kwargs: around(lambda x: run(function, x.cos(), *args, **kwargs), x)


def _in_save_on_cpu(function: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return function(x)


#: Each with what is plain for it.
METHODS: dict[str, tuple[Any, Any]] = {
    "checkpoint": (actckpt.checkpoint, plain),
    "offloaded inputs": (functools.partial(actckpt.checkpoint, offload_inputs=True), plain),
    **{
        name: (_of_cosine(around, actckpt.checkpoint), _of_cosine(plain, plain))
        for name, around in {
            "nested": actckpt.checkpoint,
            "in a region": in_region(),
            "in save_on_cpu": _in_save_on_cpu,
            "in offload": in_offload(),
        }.items()
    },
}


def _rerun(place: str, run: Any, changes: bool) -> list[Tensor]:
    torch.manual_seed(4)
    x, t = torch.randn(3, 4, requires_grad=True), inference(3, 4)
    made_inside.clear()
    y = PLACES[place](run, x, t)
    for tensor in (t, *made_inside) if changes else ():
        change(tensor)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return [*first, *torch.autograd.grad(y.sum(), x)]


#: Arguments of modules, of which a rerun gets a copy.
_COPIED = ("argument of a module", "view", "expanded", "changed by the function")


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
def test_a_rerun_gets_inference_tensors_as_they_were_or_raises(place: str, method: str, changes: bool) -> None:
    ours, plain = METHODS[method]
    expected = _rerun(place, plain, changes)
    must_run = (not changes and not place.startswith("changed by")) or (method == "checkpoint" and place in _COPIED)
    try:
        found = _rerun(place, ours, changes)
    except torch.utils.checkpoint.CheckpointError as error:
        assert not must_run, error
        assert any(words in str(error) for words in ("inference", "changed in place", "by an inplace operation"))
    else:
        assert_equal(found, expected)


def test_torch_raises_where_an_inference_tensor_is_an_argument() -> None:
    x, t = torch.randn(3, requires_grad=True), inference(3)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        torch.utils.checkpoint.checkpoint(_read, x, t, use_reentrant=False)


def test_a_normal_tensor_that_is_changed_in_inference_mode_is_noticed() -> None:
    x, t = torch.randn(3, requires_grad=True), torch.randn(3)
    with actckpt.region():
        y = (x + t).sin()
    z = actckpt.checkpoint(AsModule(), x, t)
    change(t)
    with pytest.raises(actckpt.errors.SavedTensorChangedError):
        y.sum().backward()
    with pytest.raises(actckpt.errors.InputChangedError):
        z.sum().backward()
