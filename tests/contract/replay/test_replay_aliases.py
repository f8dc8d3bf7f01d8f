"""Memory with several version counters: a change through any saved alias raises, as plainly, or does no harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf
from torch import Tensor

import actckpt

aten = torch.ops.aten
KEEP = [aten.mul, aten.sin]
OFFLOAD = actckpt.policies.PerOp({"aten.mul": "offload", "aten.sin": "offload"})

Program = Callable[[Tensor, Any], tuple[list[Tensor], Tensor]]


pytestmark = pytest.mark.usefixtures("no_audit")


def _data(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    with region:
        h = x * 2
        d = h.data
        loss = (h.sin() + d * x).sum()
    return [h, d], loss


def _data_first(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    with region:
        h = x * 2
        d = h.data
        loss = (d * x).sum() + h.sin().sum() + (d * x * x).sum() + h.cos().sum()
    return [h, d], loss


def _chunks(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    with region:
        h = x * 2
        first, second = aten.unsafe_chunk(h, 2)
        loss = h.sin().sum() + first.cos().sum() + second.cos().sum()
    return [h, first, second], loss


def _chunks_alone(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    with region:
        h = x * 2
        first, second = aten.unsafe_chunk(h, 2)
        loss = first.cos().sum() + second.sum()
    return [h, first, second], loss


def _input(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    i = torch.ones(4, 4)
    d = i.data
    with region:
        loss = (i * x + d * x * x).sum()
    return [i, d], loss


def _needed_input(x: Tensor, region: Any) -> tuple[list[Tensor], Tensor]:
    i = torch.ones(4, 4)
    d = i.data
    with region:
        loss = (((i + 1) * x).sin() + ((d + 2) * x).cos()).sum()
    return [i, d], loss


PROGRAMS = [
    (p, n)
    for p, k in ((_data, 2), (_data_first, 2), (_chunks, 3), (_chunks_alone, 3), (_input, 2))
    for n in (None, *range(k))
]


def _run(program: Program, change: int | None, region: Any) -> Tensor | None:
    """Return the gradient, None if it cannot be had since something changed."""
    torch.manual_seed(0)
    x = leaf(4, 4)
    aliases, loss = program(x, region)
    if change is not None:
        with torch.no_grad():
            aliases[change].mul_(3)
    try:
        return torch.autograd.grad(loss, x)[0]
    except actckpt.errors.SavedTensorChangedError:
        assert not isinstance(region, nullcontext)
        return None
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None


@pytest.mark.parametrize("policy", [KEEP, OFFLOAD, "recompute", "keep", "offload"], ids=range(5))
@pytest.mark.parametrize(("program", "change"), PROGRAMS, ids=lambda p: getattr(p, "__name__", p))
def test_a_change_that_plain_autograd_notices_never_gives_another_gradient(
    program: Program, change: int | None, policy: Any
) -> None:
    unchanged = _run(program, None, nullcontext())
    plain = _run(program, change, nullcontext())
    found = _run(program, change, actckpt.region(policy))
    assert unchanged is not None
    if found is None:
        assert plain is None or not torch.equal(plain, unchanged)
    elif plain is None:
        assert torch.equal(found, unchanged)
    else:
        assert torch.equal(found, plain) or torch.equal(found, unchanged)


@pytest.mark.parametrize("change", [0, 1])
def test_an_input_that_replay_reads_is_watched_through_every_alias(change: int) -> None:
    assert _run(_needed_input, None, actckpt.region()) is not None
    assert _run(_needed_input, change, actckpt.region()) is None


def test_bytes_copied_before_they_are_overwritten_are_not_watched() -> None:
    x = leaf(4, 4)
    i = torch.ones(4, 4)
    d = i.data
    with actckpt.region():
        y = ((i + 1) * x).sum() + ((d + 2) * x).sum()
        d.mul_(5)
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.full((4, 4), 5.0))


@pytest.mark.parametrize("times_read", [0, 1, 2])
def test_a_parameter_that_changes_unseen_after_it_was_read_raises_also_where_its_data_was_read(times_read: int) -> None:
    """What `.data` returns counts versions of its own, and does not tell of it."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)

    def run(region: Any) -> Tensor:
        data = weight.data
        with region:
            y = (x * weight).sin()
            for _ in range(times_read):
                y = y * (data * x)
            with torch.no_grad(), torch._C._DisableTorchDispatch():  # as another thread would
                weight.add_(1)
        (grad,) = torch.autograd.grad(y.sum(), weight)
        return grad

    run(nullcontext())
    for policy in ("recompute", []):
        with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
            run(actckpt.region(policy))


def _through_data(when: str, region: Any) -> Tensor:
    torch.manual_seed(0)
    x = leaf(4, 4)
    with region:
        h = x * 2
        loss = h.sin().sum()
        if when == "inside":
            h.data.mul_(3)
    if when == "after":
        h.data.mul_(3)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("policy", "sees"),
    [
        pytest.param("keep", {"inside": "new", "after": "new"}, id="keep, nothing recorded"),
        pytest.param(KEEP, {"inside": "old", "after": "new"}, id="keep"),
        pytest.param("recompute", {"inside": "old", "after": "old"}, id="recompute"),
    ],
)
def test_what_a_write_through_data_does_is_as_documented(policy: Any, sees: dict[str, str]) -> None:
    bytes_of = {"old": _through_data("never", nullcontext()), "new": _through_data("after", nullcontext())}
    assert torch.equal(_through_data("inside", nullcontext()), bytes_of["new"])
    assert not torch.equal(bytes_of["old"], bytes_of["new"])
    for when, which in sees.items():
        assert torch.equal(_through_data(when, actckpt.region(policy)), bytes_of[which]), when


def test_a_compiled_function_that_overwrites_what_replay_needs_raises() -> None:
    @torch.compile(backend="aot_eager")
    def doubled(x: Tensor) -> Tensor:
        return x.mul_(2).sin()

    def run(region: Any) -> Tensor:
        w, x = leaf(3), torch.ones(3)
        with region:
            y = (x + 1) * w  # saves x + 1, and needs x to make it again
            doubled(x)
        return torch.autograd.grad(y.sum(), w)[0]

    assert torch.equal(run(nullcontext()), torch.full((3,), 2.0))
    assert torch.equal(run(actckpt.region(["aten.add"])), torch.full((3,), 2.0))
    if torch.__version__ < (2, 10):  # the region sees what it does, and replays around it
        assert torch.equal(run(actckpt.region()), torch.full((3,), 2.0))
        return
    with pytest.raises(actckpt.errors.ActckptError, match=r"(?s)cannot be brought back.*a compiled function"):
        run(actckpt.region())


def test_in_place_foreach_operators_count_versions_up_under_the_recorder() -> None:
    x = torch.ones(4, requires_grad=True)
    before = x * 2
    used = before.sin()  # saved outside of the region, so that autograd itself must notice
    with actckpt.region("recompute"), torch.no_grad():
        torch._foreach_mul_([before], 2.0)
    assert before._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


@pytest.mark.parametrize("policy", [["aten.mul"], ["aten.mul_"], "recompute"])
def test_a_kept_value_changed_through_data_is_watched_through_the_saved_tensor(policy: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    with actckpt.region(policy):
        base = x * 1.5
        base.data.mul_(1.25)
        y = base.cos()
    expected = -base.detach().clone().sin() * 1.5
    with torch.no_grad():
        base.zero_()
    if policy == "recompute":
        assert_equal(torch.autograd.grad(y.sum(), x)[0], expected)
    else:
        with pytest.raises(actckpt.errors.SavedTensorChangedError, match="expected version"):
            torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("runs_checkpoint", [False, True])
@pytest.mark.parametrize("name", ["tanh", "sin"])
def test_a_kept_product_is_watched_through_what_matmul_gave_on(name: str, runs_checkpoint: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function() -> tuple[Tensor, Tensor]:
        product = torch.randn(2, 2, 4) @ weight
        return product, getattr(product, name)()

    if runs_checkpoint:
        product, y = actckpt.checkpoint(function, policy=["aten.mm"])
    else:
        with actckpt.region(["aten.mm"]):
            product, y = function()
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    with torch.no_grad():
        product.zero_()
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="expected version"):
        torch.autograd.grad(y.sum(), weight)


@pytest.mark.parametrize("times", [1, 2])
def test_a_view_of_a_parameter_that_its_region_overwrites_comes_back_as_it_was(times: int) -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    before = weight.detach().clone()
    with actckpt.region(["aten.mm"]):
        y = x @ weight.t()
        with torch.no_grad():
            for _ in range(times):
                weight.mul_(2)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 4) @ before)


def test_a_view_of_a_parameter_that_changed_after_its_region_raises() -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    with actckpt.region(["aten.mm"]):
        y = x @ weight.t()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_tensor_freed_after_its_region_is_not_replayed_from() -> None:
    weight = torch.rand(64, dtype=torch.complex64)
    x = torch.rand(64, requires_grad=True)
    with actckpt.region():
        y = (weight.conj().real.sin().sum() * x.sin()) * x
        z = torch.view_as_real(weight.conj() * x.detach()).sin()[:, 0] * x
    weight.untyped_storage().resize_(0)
    with pytest.raises(actckpt.errors.ActckptError, match=r"0 bytes now; 512 were recorded"):
        (y.sum() + z.sum()).backward()
