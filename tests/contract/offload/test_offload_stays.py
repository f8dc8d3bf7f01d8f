"""What offload leaves where it is, how many bytes it copies, and changes in place after saving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from internals.stores import flush
from offload_oracle import TwoTensor, two_tensor, unique_saved_bytes
from oracle import leaf, mlp

import actckpt
from actckpt.demo import LanguageModel
from actckpt.errors import SavedTensorChangedError

pytestmark = pytest.mark.usefixtures("kind")


class _Owner(torch.nn.Module):
    """Uses its parameters and buffers through every kind of alias."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=not is_frozen)
        self.register_buffer("scale", torch.randn(8, 8))
        self.register_buffer("table", torch.randn(64, 8), persistent=False)

    def forward(self, x: torch.Tensor, how: Callable[[_Owner], torch.Tensor]) -> torch.Tensor:
        return x * how(self)


_ALIASES: dict[str, Callable[[_Owner], torch.Tensor]] = {
    "parameter": lambda m: m.weight,
    "transpose": lambda m: m.weight.t(),
    "slice": lambda m: m.weight[2:3],
    "expanded": lambda m: m.weight[0].expand(8, 8),
    "detached": lambda m: m.weight.detach(),
    "data": lambda m: m.weight.data,
    "detached view": lambda m: m.weight.detach().view(64)[8:16],
    "buffer": lambda m: m.scale,
    "view of a buffer": lambda m: m.scale.t()[1:2],
    "rows of a buffer": lambda m: m.table[8:16],
    "buffer's data": lambda m: m.scale.data.view(64).view(8, 8),
}


@pytest.mark.parametrize("how", ["called", "forward called as a method", "applied block"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("alias", _ALIASES)
def test_what_a_module_owns_is_never_moved(alias: str, is_frozen: bool, how: str) -> None:
    """An applied block's own hooks have run when its forward opens the context: only its children are learnt."""
    model, x = _Owner(is_frozen), leaf(8, 8)
    if how == "applied block":
        actckpt.apply(torch.nn.ModuleList([model]), policy="offload", blocks=_Owner, min_bytes=0)
        y = model(x, _ALIASES[alias])
    else:
        with actckpt.offload(min_bytes=0):
            y = (model if how == "called" else model.forward)(x, _ALIASES[alias])
    assert actckpt.stats().offloaded_bytes == 0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], _ALIASES[alias](model).expand(8, 8))


_BASELESS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view of detached": lambda w: w.detach().t()[2:],
    "part of data": lambda w: w.data[:3],
}
_OF_FROZEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"transposed": lambda w: w.t(), "part": lambda w: w[2:]}
_OWNERS = [(alias, owner) for alias in _BASELESS for owner in ("leaf", "parameter")]
_OWNERS += [(alias, "frozen") for alias in _OF_FROZEN]


@pytest.mark.parametrize(("alias", "owner"), _OWNERS)
def test_aliases_of_a_parameter_stay_in_code_without_modules(alias: str, owner: str) -> None:
    """The parameter itself was saved before, here or in an earlier step, or its view tells of it."""
    weight, x = leaf(8, 8), leaf(8, 8)
    if owner != "leaf":
        weight = torch.nn.Parameter(weight.detach(), requires_grad=owner != "frozen")
    with actckpt.offload(min_bytes=0):
        first = x * weight if owner != "frozen" else x.sum()
        used = (_BASELESS | _OF_FROZEN)[alias](weight)
        y = x[: len(used)] * used
    assert actckpt.stats().offloaded_bytes == 0
    assert torch.autograd.grad(first.sum() + y.sum(), x)[0].shape == x.shape


def test_inner_tensors_of_a_parameter_that_is_a_subclass_stay() -> None:
    """As of a DTensor parameter, or a quantised one."""
    weight, x = torch.nn.Parameter(two_tensor(16)), two_tensor(16).requires_grad_()
    with actckpt.offload(min_bytes=0):
        y = x * weight
    assert actckpt.stats().offloaded_bytes == 0
    del y


def test_storages_of_parameters_that_are_gone_are_forgotten() -> None:
    """An activation at the address of a parameter that died is moved."""
    x = leaf(64)
    for _ in range(2000):
        with actckpt.offload(min_bytes=0):
            y = torch.nn.Parameter(torch.randn(64)) * 2.0 * x
        del y
    actckpt.reset_stats()
    with actckpt.offload(min_bytes=0):
        y = (x * 1.5).sin()
    assert actckpt.stats().offloaded_bytes == 64 * 4
    del y


@pytest.mark.parametrize("how", ["module", "method", "closure", "partial", "child's"])
def test_a_buffer_given_to_a_region_with_offloaded_inputs_stays(how: str) -> None:
    block = _Owner(is_frozen=True)
    outer = torch.nn.Sequential(block)
    outer.forward = block.forward
    big = torch.randn(1024, 1024)
    block.register_buffer("big", big)
    functions: dict[str, Callable[..., Any]] = {
        "module": block,
        "method": block.forward,
        "closure": lambda x, how: block(x, how),
        "partial": partial(block.forward),
        "child's": outer,
    }
    x = leaf(1024, 1024)
    hidden = x * 1.5
    y = actckpt.checkpoint(functions[how], hidden, lambda m: m.big, offload_inputs=True)
    z = actckpt.checkpoint(torch.mul, hidden, block.big, offload_inputs=True)
    assert actckpt.stats().offloaded_bytes == hidden.nbytes
    expected = torch.autograd.grad((hidden * big + hidden * big).sum(), x, retain_graph=True)
    assert torch.equal(torch.autograd.grad((y + z).sum(), x)[0], expected[0])


def _transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, activation=F.gelu)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 16, 32)


def _demo_model() -> tuple[torch.nn.Module, torch.Tensor]:
    model = LanguageModel(layers=2, dim=32, heads=4, kv_heads=2, seq=16, dropout=0.1)
    return model, torch.randint(0, 256, (2, 16))


@pytest.mark.parametrize("build", [_transformer, _demo_model])
def test_bytes_copied_are_exactly_the_unique_activation_bytes(build: Callable[[], Any]) -> None:
    """Counted through identity hooks: what autograd saves and no module owns; of packed storages, what was saved."""
    model, x = build()
    owned = [*model.parameters(), *model.buffers()]
    torch.manual_seed(3)
    saved_bytes, storage_bytes = unique_saved_bytes(lambda: model(x), owned)
    torch.manual_seed(3)
    with actckpt.offload(min_bytes=0):
        y = model(x)
    assert 0 < saved_bytes <= actckpt.stats().offloaded_bytes <= storage_bytes
    assert actckpt.stats().offloaded_bytes <= 1.005 * saved_bytes
    del y


def test_a_tensor_dtype_and_device_that_no_store_takes_stays() -> None:
    sparse = torch.eye(4).to_sparse().requires_grad_()
    with actckpt.offload(min_bytes=0):
        y = torch.sparse.sum(sparse * sparse)
    y.backward()
    assert torch.equal(sparse.grad.to_dense(), 2 * torch.eye(4))


# Changed in place after it was saved.


def _change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda h: h.add_(1),
    "through a view": lambda h: h.view(-1)[3].zero_(),
    "through detach": lambda h: h.detach().mul_(2),
    "without grad": _change,
    "as out": lambda h: torch.sin(torch.ones(8, 8), out=h.detach()),
    "by index": lambda h: h.detach().__setitem__((0, 0), 5.0),
}


@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["moved", "kept"])
@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "in flight"])
@pytest.mark.parametrize("how", _CHANGES)
def test_a_change_in_place_raises(how: str, is_flushed: bool, min_bytes: int) -> None:
    x = leaf(8, 8)
    h = x * 1.5
    with actckpt.offload(min_bytes=min_bytes):
        y = h.sin()
    if is_flushed:
        flush()
    _CHANGES[how](h)
    with pytest.raises(SavedTensorChangedError, match=r"shape \(8, 8\).*\n.*version 1; expected version 0"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("min_bytes", [None, 0, 1 << 20], ids=["plain", "moved", "kept"])
def test_a_subclass_changed_in_place_after_it_was_saved_raises(min_bytes: int | None) -> None:
    x, weight = two_tensor(16), two_tensor(16).requires_grad_()
    with nullcontext() if min_bytes is None else actckpt.offload(min_bytes=min_bytes):
        y = weight * x
    flush()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(y, weight, TwoTensor(torch.ones(16), torch.ones(16)))


def _step_of_an_optimizer() -> torch.Tensor:
    model = mlp(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with actckpt.offload(min_bytes=0):
        one, other = model(torch.randn(4, 8)).sum(), model(torch.randn(4, 8)).sum()
    one.backward()
    optimizer.step()
    return other


def _of_a_parameter(use: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    with actckpt.offload(min_bytes=0):
        y = leaf(8, 8) @ use(weight)
    _change(weight)
    return y.sum()


@actckpt.offload(min_bytes=0)
def _of_an_output(operator: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return operator(leaf(8, 8) * 1.5).add_(1).sum()


@pytest.mark.parametrize(
    "change",
    [
        *(partial(_of_an_output, operator) for operator in (torch.exp, torch.sigmoid, torch.relu)),
        *(partial(_of_a_parameter, use) for use in (torch.t, lambda weight: weight)),
        _step_of_an_optimizer,
    ],
)
def test_a_change_of_an_output_or_a_parameter_raises(change: Callable[[], torch.Tensor]) -> None:
    loss = change()
    with pytest.raises(SavedTensorChangedError):
        loss.backward()


def test_a_change_after_backward_is_nobodys_business() -> None:
    h = leaf(8, 8) * 1
    with actckpt.offload(min_bytes=0):
        y = h.sin()
    value = h.detach().clone()
    (grad,) = torch.autograd.grad(y.sum(), h)
    _change(h)
    assert torch.equal(grad, value.cos())


def test_a_tensor_changed_and_saved_again_comes_back_as_it_was_then() -> None:
    x, h = leaf(8, 8), torch.randn(8, 8)
    before = h.clone()
    with actckpt.offload(min_bytes=0):
        y = x * h
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        h.add_(1)
        z = x * h
    flush()
    assert torch.equal(first, before)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], before + 1)
    with pytest.raises(SavedTensorChangedError):
        torch.autograd.grad(y.sum(), x)
