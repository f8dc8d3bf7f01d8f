"""Saved-tensor hooks around checkpoints: which tensors they get, and when their owner is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import assert_equal, in_offload, in_region, leaf, plain, theirs

import actckpt

Method = Callable[..., Any]


class HooksOwner:
    """Has hooks as methods, and keeps what is made inside of them."""

    num_packed = 0
    output: Any = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_packed += 1
        return tensor.detach()  # a result that is held with its graph would hold itself

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def around(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return function(*args, **kwargs)


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor | float = 1.0) -> torch.Tensor:
        return (self.weight * x).sin().exp().sin()


def _recompute(info: actckpt.SavedTensorInfo) -> actckpt.Action:
    return actckpt.Action.RECOMPUTE


def _applied(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = torch.nn.Sequential(OneWeight())
    actckpt.apply(model, policy=[torch.ops.aten.sin.default], blocks=OneWeight)
    return model(function(*args, **kwargs))


CHECKPOINTS: dict[str, Method] = {
    "rerun": actckpt.checkpoint,
    "replay": partial(actckpt.checkpoint, policy=_recompute),
    "replay, keeps": partial(actckpt.checkpoint, policy=[torch.ops.aten.sin.default]),
}
METHODS: dict[str, Method] = {
    **CHECKPOINTS,
    "torch": theirs,
    "plain": plain,
    "region": in_region(_recompute),
    "region, keeps": in_region("keep"),
    "offload": in_offload(),
    "apply": _applied,
}


def _made(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).exp()


#: Calls whose hooks get nothing from torch's checkpoint: leaves that are no positional arguments.
LEAVES: dict[str, Callable[[Method, torch.Tensor], Any]] = {
    "keyword": lambda method, x: method(lambda x: x.exp().exp(), x=x),
    "closure": lambda method, x: method(lambda: x.exp().exp()),
    "default": lambda method, x: method(lambda x=x: x.exp().exp()),
    "partial": lambda method, x: method(partial(torch.exp, x)),
    "list": lambda method, x: method(lambda items: items[0].exp().exp(), [x]),
    "attribute": lambda method, x: method(lambda held: held.x.exp().exp(), SimpleNamespace(x=x)),
    "parameter": lambda method, x: method(lambda w: w.exp().exp(), w=torch.nn.Parameter(torch.ones(3))),
    "view": lambda method, x: method(lambda: x.view(3, 1).exp().exp()),
    "module": lambda method, x: method(OneWeight()),
    "method of a module": lambda method, x: method(OneWeight().forward),
}

#: Calls whose hooks get something.
OTHERS: dict[str, Callable[[Method, torch.Tensor], Any]] = {
    "argument": lambda method, x: method(lambda x: x.exp().exp(), x),
    "argument made before": lambda method, x: method(lambda x: x.exp().exp(), _made(x)),
    "argument without a gradient": lambda method, x: method(OneWeight(), x.detach()),
    "keyword made before": lambda method, x: method(lambda x: x.exp().exp(), x=_made(x)),
    "closure made before": lambda method, x: (lambda y: method(lambda: y.exp().exp()))(_made(x)),
    "nested": lambda method, x: method(lambda x: method(lambda x: x.exp().exp(), x.cos()).cos(), x),
}


def _is_freed(owners: list[HooksOwner]) -> bool:
    """Whether the only owner of a list is freed once the list lets go of it."""
    reference = weakref.ref(owners[0])
    owners.clear()
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("call", LEAVES)
@pytest.mark.parametrize("method", ["torch", "rerun", "replay"])
def test_hooks_get_no_leaf_that_is_no_argument_and_their_owner_is_freed_with_its_output(method: str, call: str) -> None:
    owners = [HooksOwner()]
    owners[0].output = owners[0].around(lambda: LEAVES[call](METHODS[method], leaf(3)))
    assert owners[0].num_packed == 0
    assert _is_freed(owners)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("call", ["closure", "module", *OTHERS])
@pytest.mark.parametrize("method", METHODS)
def test_hooks_that_keep_the_output_are_freed_unless_a_graph_holds_what_they_packed(
    method: str, call: str, where: str, ends: bool
) -> None:
    # The collector does not see what a graph of autograd holds: not through plain operators either.
    owners = [owner := HooksOwner()]
    made = partial((LEAVES | OTHERS)[call], METHODS[method])
    if where == "around":
        owner.output = owner.around(made, leaf(3))
    else:
        owner.output = METHODS[method](partial(owner.around, made), leaf(3))
    if ends:
        owner.output.sum().backward()
    reference, is_held = weakref.ref(owner), owner.num_packed > 0 and not ends
    del owner, made
    assert _is_freed(owners) != is_held
    if (kept := reference()) is not None:
        kept.output = None  # breaks the cycle
        del kept
        assert reference() is None


def _copying(method: Method, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach().clone(),), lambda packed: packed[0]):
        return method(function, *args, **kwargs)


def _program(outer: Method, inner: Method, x: torch.Tensor, w: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    def core(y: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return (y * w).sin() * view.sin() + (scale * w).exp().cos()

    def middle(y: torch.Tensor) -> torch.Tensor:
        t = (y * w).cos()
        made: torch.Tensor = inner(core, t, scale=w * t).tanh()
        return made * w + inner(lambda: (w * t).sin().exp() * view.cos())

    result: torch.Tensor = outer(middle, x)
    return result


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another leaf": lambda w: (w.detach() + 1).requires_grad_(),
    "view": lambda w: w.view(3, 1)[:, 0],
    "slice": lambda w: w[:1],
}


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "made before"])
@pytest.mark.parametrize("where", ["around both", "between"])
@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", ["torch", "rerun", "replay", "replay, keeps", "region", "region, keeps"])
def test_gradients_are_those_of_plain_autograd_where_hooks_get_some_leaves(
    outer: str, inner: str, where: str, is_leaf: bool
) -> None:
    # In a rerun of the outer one, a tensor that was made before is a leaf, too.
    x, w = leaf(3), leaf(3)

    def grads(outer: Method, inner: Method, view: str) -> Any:
        y = _program(outer, inner, x if is_leaf else x * 2, w, VIEWS[view](w))
        return torch.autograd.grad(y.sum(), (x, w))

    for view in VIEWS:
        if where == "between":
            found = grads(METHODS[outer], partial(_copying, METHODS[inner]), view)
        else:
            found = grads(partial(_copying, METHODS[outer]), METHODS[inner], view)
        assert_equal(found, grads(plain, plain, view))


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_leaf_that_hooks_do_not_get_must_not_change(method: str) -> None:
    x = leaf(3)
    y = _copying(CHECKPOINTS[method], lambda: x.exp().exp())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(actckpt.CheckpointError, match=r"changed in place|modified by an inplace"):
        y.sum().backward()


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_leaf_may_change_where_torch_allows_it(method: str) -> None:
    x, found = leaf(3), []
    for run in (plain, CHECKPOINTS[method]):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = run(lambda x: x.exp().exp(), x)
            with torch.no_grad():
                x.mul_(2)
            found.append(torch.autograd.grad(y.sum(), x))
            with torch.no_grad():
                x.div_(2)
    assert_equal(*found)


@pytest.mark.parametrize("hold", [lambda h: [h], lambda h: {"h": h}, lambda h: lambda: h, lambda h: [h[:]]])
def test_an_argument_that_is_held_elsewhere_too_must_not_change(hold: Callable[[torch.Tensor], Any]) -> None:
    """The hooks copy the argument. The rerun reads the original through a list or a closure."""
    x, h = leaf(3), torch.ones(3)

    def function(x: torch.Tensor, h: torch.Tensor, held: Any) -> torch.Tensor:
        other = held() if callable(held) else held["h"] if isinstance(held, dict) else held[0]
        return (x * h * other).exp()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        y = actckpt.checkpoint(function, x, h, hold(h))
    h.add_(1)
    with pytest.raises(actckpt.errors.InputChangedError, match="changed in place"):
        y.sum().backward()
