"""`apply` with operators that give other results each time, as dispatches to experts do: their results are kept."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt.errors import ActckptWarning, RerunMismatchError

_ROWS = 12


class _Calls:
    """Counts the calls of all dispatches: each has another layout."""

    num = itertools.count(1)


def _layout(num_rows: int, num_padded: int = 0) -> np.ndarray[Any, Any]:
    """Return where each row goes, and -1 for rows of padding; another layout each time, which no generator gives."""
    order = np.random.default_rng(next(_Calls.num)).permutation(num_rows + num_padded)
    return np.where(order < num_rows, order, -1)


@torch.library.custom_op("actckpt_tests::dispatch", mutates_args=())
def _dispatch(x: Tensor) -> tuple[Tensor, Tensor]:
    layout = torch.from_numpy(_layout(len(x))).to(x.device)
    return x[layout], layout


@torch.library.custom_op("actckpt_tests::dispatch_padded", mutates_args=())
def _dispatch_padded(x: Tensor) -> tuple[Tensor, Tensor]:
    layout = torch.from_numpy(_layout(len(x), num_padded=next(_Calls.num) % 5)).to(x.device)
    return torch.where((layout < 0)[:, None], 0, x[layout]), layout


def _to_experts(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
    (layout,) = ctx.saved_tensors
    is_row = layout >= 0
    return grad.new_empty(int(is_row.sum()), grad.shape[1]).index_copy(0, layout[is_row], grad[is_row])


for _operator in (_dispatch, _dispatch_padded):
    _operator.register_autograd(_to_experts, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))


class _Outside(torch.autograd.Function):
    """A kernel that no operator calls: it writes to memory that it gets by its address."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        moved, layout = torch.empty_like(x), torch.empty(len(x), dtype=torch.int64)
        order, rows = _layout(len(x)), np.empty(tuple(x.shape))
        ctypes.memmove(rows.ctypes.data, x.data_ptr(), rows.nbytes)
        for tensor, values in ((moved, rows[order]), (layout, order)):
            ctypes.memmove(tensor.data_ptr(), values.ctypes.data, values.nbytes)
        ctx.save_for_backward(layout)
        ctx.mark_non_differentiable(layout)
        return moved, layout

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return _to_experts(ctx, grad, _)


DISPATCHES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "actckpt_tests.dispatch": lambda x: _dispatch(x),  # unlike functions, operators cannot be copied
    "actckpt_tests.dispatch_padded": lambda x: _dispatch_padded(x),
    "outside of the dispatcher": _Outside.apply,
}


class Experts(nn.Module):
    """Moves rows, works on each, and moves them back: results do not depend on the layout. Small integers: exact."""

    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.dispatch, self.num_calls = dispatch, 0
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        moved, layout = self.dispatch(x)
        moved = self.second(self.first(moved).square().relu())
        is_row = layout >= 0
        return x + torch.zeros_like(x).index_copy(0, layout[is_row], moved[is_row])


class Model(nn.Module):
    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]], num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Experts(dispatch) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _losses(model: nn.Module, num: int) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.arange(4.0 * _ROWS, dtype=torch.float64).reshape(_ROWS, 4).remainder(3).requires_grad_()
    return [model(x * (i + 1)).sum() for i in range(num)], [x, *model.parameters()]


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    (loss,), leaves = _losses(model, 1)
    loss.backward()
    return [tensor.grad for tensor in leaves if tensor.grad is not None]


def _applied(dispatch: Callable[[Tensor], tuple[Tensor, Tensor]], **options: Any) -> Model:
    model = Model(dispatch)
    actckpt.apply(model, blocks=Experts, **options)
    return model


@pytest.fixture(params=DISPATCHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_no_operator_calls_raises_if_it_is_not_listed() -> None:
    with pytest.raises(RerunMismatchError, match=r"no right gradient|saves other|different"):
        _gradients(_applied(_Outside.apply))


@contextlib.contextmanager
def _found(operator: str) -> Iterator[None]:
    with pytest.warns(ActckptWarning, match=f"{operator}.*returns other values"):
        yield
    assert actckpt.configure().opaque == (f"{operator}.default",)


@pytest.fixture(params=["actckpt_tests.dispatch", "actckpt_tests.dispatch_padded"])
def operator(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("has_effect", [False, True])
def test_operators_that_are_not_listed_are_found_in_the_first_step(operator: str, has_effect: bool) -> None:
    expected, model = _gradients(Model(DISPATCHES[operator])), _applied(DISPATCHES[operator])
    with _effect(operator) if has_effect else contextlib.nullcontext():
        with _found(operator):
            assert_equal(_gradients(model), expected)
        assert model.blocks[0].num_calls == 2
        for _ in range(3):
            assert_equal(_gradients(model), expected)
    assert model.blocks[0].num_calls == 5


@contextlib.contextmanager
def _effect(operator: str) -> Iterator[None]:
    from torch._higher_order_ops import effects

    overload = getattr(torch.ops.actckpt_tests, operator.partition(".")[2]).default
    effects._register_effectful_op(overload, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        if hasattr(effects, "_deregister_effectful_op"):  # torch 2.9
            effects._deregister_effectful_op(overload)
        else:
            effects._register_effectful_op(overload, None)


@pytest.mark.parametrize("num_forwards", [1, 3])
def test_they_are_found_where_forwards_precede_the_first_backward_and_graphs_are_read_twice(
    operator: str, num_forwards: int
) -> None:
    def gradients(model: nn.Module) -> list[tuple[Tensor, ...]]:
        losses, leaves = _losses(model, num_forwards)
        return [torch.autograd.grad(loss, leaves, retain_graph=again) for loss in losses for again in (True, False)]

    expected = gradients(Model(DISPATCHES[operator]))
    with _found(operator):
        assert_equal(gradients(_applied(DISPATCHES[operator])), expected)


def test_a_copy_of_the_model_finds_them_anew(operator: str) -> None:
    expected, model = _gradients(Model(DISPATCHES[operator])), _applied(DISPATCHES[operator])
    with _found(operator):
        _gradients(model)
    actckpt.configure(opaque=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shown once per operator
        assert_equal(_gradients(copy.deepcopy(model)), expected)
    assert actckpt.configure().opaque == (f"{operator}.default",)


class _Overwriting(Experts):
    """Overwrites what the dispatch returned, so that a rerun cannot get its first results."""

    def forward(self, x: Tensor) -> Tensor:
        moved, layout = self.dispatch(x)
        layout.add_(1)
        moved = self.second(self.first(moved).square().relu())
        return x + torch.zeros_like(x).index_copy(0, layout - 1, moved)


def test_results_that_are_overwritten_raise() -> None:
    @torch.library.custom_op("actckpt_tests::layout", mutates_args=())
    def layout_of(x: Tensor) -> Tensor:
        return torch.from_numpy(_layout(len(x))).to(x.device)

    torch.manual_seed(0)
    model = nn.Sequential(*(_Overwriting(lambda x: (x[layout := layout_of(x)], layout)) for _ in range(2)))
    actckpt.apply(model, blocks=_Overwriting)
    with pytest.raises(RerunMismatchError):
        _gradients(model)


def _of_rounding(x: Tensor) -> Tensor:
    return x * 2 * (1 + next(_Calls.num) % 2 * 2.0**-50)


def _of_random_numbers(x: Tensor) -> Tensor:
    return x * 2 * torch.rand(x.shape, dtype=x.dtype).round()


def _of_arguments(x: Tensor) -> Tensor:
    return x * 2


def _of_memory(x: Tensor) -> Tensor:
    """Leave the last column unwritten, as flash attention does with the state of its dropout."""
    _ = [torch.zeros(x.shape, dtype=x.dtype) for _ in range(16)]  # overwrites memory that was filled in earlier runs
    result = torch.empty(x.shape, dtype=x.dtype)
    result[:, :3] = x.detach()[:, :3] * 2
    if (result[:, 3] != 3).any():  # as if what was there before differed in each run; memory that is filled stays
        result[:, 3] = next(_Calls.num) % 5 / 10
    return result


_made: list[weakref.ref[Any]] = []


@pytest.mark.filterwarnings("ignore:The rerun of .*(as small as one of rounding|With uninitialized memory filled)")
@pytest.mark.parametrize("function", [_of_rounding, _of_random_numbers, _of_arguments, _of_memory])
def test_operators_that_are_repeatable_are_rerun(function: Callable[[Tensor], Tensor]) -> None:
    """With random numbers of torch, too, which reruns restore."""

    def doubled(x: Tensor) -> Tensor:
        result = function(x)
        _made.append(weakref.ref(result.untyped_storage()))
        return result

    operator = torch.library.custom_op(f"actckpt_tests::double{function.__name__}", mutates_args=())(doubled)
    operator.register_autograd(lambda ctx, grad: grad * 2)
    model = nn.Sequential(*(nn.Sequential(_Called(operator), nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).double()
    actckpt.apply(model, blocks=nn.Sequential)
    _made.clear()
    for _ in range(2):
        loss = model(torch.randn(3, 4).double()).square().sum()
        loss.backward()
        del loss
        assert not any(storage() is not None for storage in _made)
    assert actckpt.configure().opaque == ()
    num_calls = 8  # 2 blocks, in a forward and a rerun, of 2 steps
    assert len(_made) > num_calls if function is _of_memory else len(_made) == num_calls


class _Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_they_are_found_after_forwards_without_a_backward(operator: str) -> None:
    expected, model = _gradients(Model(DISPATCHES[operator])), _applied(DISPATCHES[operator])
    for _ in range(19):
        _losses(model, 1)
    with _found(operator):
        assert_equal(_gradients(model), expected)


def test_calls_that_held_nothing_raise(operator: str) -> None:
    losses, _ = _losses(_applied(DISPATCHES[operator]), 19)
    with pytest.raises(
        RerunMismatchError, match=r"more than 16 calls came before the first backward|is different from its"
    ):
        sum(losses).backward()


class _Cached(nn.Module):
    """Its first call runs the operator once more, and keeps the result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4).double()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.function(torch.ones(3, 4).double()).detach()
        return self.function(self.layer(x).tanh()).sin() * self.table


def test_a_rerun_that_runs_fewer_operators_gets_results_of_its_own_calls() -> None:
    operator = torch.library.custom_op("actckpt_tests::double_of_cached", mutates_args=())(_of_arguments)
    operator.register_autograd(lambda ctx, grad: grad * 2)
    results = []
    for is_applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(_Cached(lambda x: operator(x)), _Cached(lambda x: operator(x)))
        if is_applied:
            actckpt.apply(model, blocks=_Cached)
        x = torch.randn(3, 4).double()
        for _ in range(2):
            results.append(torch.autograd.grad(model(x).sum(), list(model.parameters())))
    assert actckpt.configure().opaque == ()
    for one, other in zip(results[:2], results[2:], strict=True):
        assert_equal(one, other)


def test_rows_that_are_swapped_are_not_taken_for_rounding() -> None:
    x = torch.randn(4096, 64, dtype=torch.bfloat16)

    @torch.library.custom_op("actckpt_tests::swapped", mutates_args=())
    def swapped(x: Tensor) -> Tensor:
        number, order = next(_Calls.num) % 7, torch.arange(len(x))
        order[[number, number + 1]] = order[[number + 1, number]]
        return x[order]

    swapped.register_autograd(lambda ctx, grad: grad)
    model = nn.Sequential(nn.Sequential(_Called(lambda x: swapped(x)), nn.Linear(64, 1).bfloat16(), nn.Tanh()))
    actckpt.apply(model, blocks=["0"])
    with _found("actckpt_tests.swapped"):
        model(x).sum().backward()


@torch.library.custom_op("actckpt_tests::scaled", mutates_args=())
def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tensor(float(next(_Calls.num)), dtype=x.dtype)
    return x * scale, scale


_scaled.register_fake(lambda x: (torch.empty_like(x), x.new_empty(())))
_scaled.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class _Scaled(nn.Module):
    """The result does not depend on the scale, but for rounding; gradients do if scales are mixed."""

    def forward(self, x: Tensor) -> Tensor:
        y, scale = _scaled(x)
        return (y / scale).sin()


@pytest.mark.parametrize("is_first", [False, True])
def test_compiled_blocks_keep_results_of_listed_operators(is_first: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(x.sin().sin().sum(), x)
    model = nn.Sequential(_Scaled(), _Scaled())
    actckpt.configure(opaque=["actckpt_tests.scaled"])  # until the fixture of all tests puts it back
    if is_first:
        actckpt.apply(model, blocks=_Scaled)
    for block in model:
        block.compile(backend="aot_eager")
    if not is_first:
        actckpt.apply(model, blocks=_Scaled)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x), expected)


def test_names_that_cannot_match_anything_are_told() -> None:
    model = _applied(DISPATCHES["actckpt_tests.dispatch"])
    known = ["actckpt_tests.dispatch", "aten.sin", "blocks.1.first", "blocks.*::aten.mm"]
    actckpt.configure(opaque=[*known, "actckpt_tests.dispatched_", "blocks.7", "block.*::aten.mm"])
    told = r"apply: 'actckpt_tests.dispatched_', 'blocks.7', 'block.\*::aten.mm' of configure.opaque"
    with pytest.warns(ActckptWarning, match=told):
        _gradients(model)


@pytest.mark.parametrize("share", ["30%", "60%", "90%"])
def test_a_plan_runs_no_block_again_whose_operators_are_listed(name: str, share: str) -> None:
    expected, model = (
        _gradients(Model(DISPATCHES[name])),
        _applied(DISPATCHES[name], budget=share, on_infeasible="warn"),
    )
    actckpt.configure(opaque=["blocks.*"] if name.startswith("outside") else [name])
    for number in range(5):
        assert_equal(_gradients(model), expected)
        assert model.blocks[0].num_calls == number + 1


@pytest.mark.parametrize("dot", [".", "::"])  # torch's own spelling, too
def test_results_of_listed_operators_are_kept(name: str, dot: str) -> None:
    expected, model = _gradients(Model(DISPATCHES[name])), _applied(DISPATCHES[name])
    opaque = ["blocks.*"] if name.startswith("outside") else [name.replace(".", dot)]
    actckpt.configure(opaque=opaque)  # until the fixture of all tests puts it back
    for _ in range(3):
        assert_equal(_gradients(model), expected)
    assert model.blocks[0].num_calls == 3


class Noisy(Experts):
    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(dispatch)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(super().forward(x)))  # type: ignore[no-any-return]


def test_random_numbers_and_buffers_are_those_of_plain_training(name: str) -> None:
    results = []
    for is_applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Noisy(DISPATCHES[name]) for _ in range(2)))
        if is_applied:
            actckpt.configure(opaque=["*"])  # until the fixture of all tests puts it back
            actckpt.apply(model, blocks=Noisy)
        torch.manual_seed(1)
        steps = [_gradients(model) for _ in range(2)]
        results.append([*itertools.chain(*steps), *model.buffers(), torch.get_rng_state()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(results[0][-1], results[1][-1])
