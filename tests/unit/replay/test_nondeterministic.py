"""Operators that return other bytes each time on the CPU: found by running them with several threads, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import actckpt
from actckpt._replay import operators, recorder
from actckpt._replay.operators import operator_of

aten = torch.ops.aten

NUM_RUNS = 12


@pytest.fixture(autouse=True)
def _four_threads() -> None:
    """With two, a sum of one part from each has only one order."""
    torch.set_num_threads(4)


class Inputs:
    """Tensors so large that torch uses all threads, and indices that name each place often."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.few = torch.zeros(50, dtype=dtype)
        self.many = torch.randn(100_000, generator=generator).mul_(100).to(dtype)
        self.index = torch.randint(0, 50, (100_000,), generator=generator)
        self.few_rows = torch.zeros(50, 100, dtype=dtype)
        self.rows = self.many.view(1000, 100)
        self.row_index = torch.randint(0, 50, (1000,), generator=generator)
        self.each_index = self.index.view(1000, 100)
        self.mask = torch.ones(100_000, dtype=torch.bool)
        self.image = self.many.view(1, 10, 100, 100)
        self.image_index = self.index.view(1, 10, 100, 100)
        self.volume = self.many.view(1, 1, 10, 100, 100)
        self.volume_index = self.index.view(1, 1, 10, 100, 100)
        self.positive = self.many.abs() + 0.5
        self.bins = torch.linspace(-300, 300, 20, dtype=dtype)
        self.grid = torch.rand(1, 100, 100, 2, generator=generator).mul_(2).sub_(1).to(dtype)
        self.bags = torch.arange(0, 1000, 20)


#: What reduces or writes into indices, adds up what many threads found, or runs libraries with threads of their own.
CASES: dict[str, Callable[[Inputs], Any]] = {
    "index_put": lambda i: aten.index_put(i.few, [i.index], i.many, True),
    "index_put of rows": lambda i: aten.index_put(i.few_rows, [i.row_index], i.rows, True),
    "index_put, no sum": lambda i: aten.index_put(i.few, [i.index], i.many, False),
    "index_put_": lambda i: aten.index_put_(i.few.clone(), [i.index], i.many, True),
    "_index_put_impl_": lambda i: aten._index_put_impl_(i.few.clone(), [i.index], i.many, True),
    "_unsafe_index_put": lambda i: aten._unsafe_index_put(i.few, [i.index], i.many, True),
    "_unsafe_masked_index_put_accumulate": lambda i: aten._unsafe_masked_index_put_accumulate(
        i.few, i.mask, [i.index], i.many
    ),
    "put": lambda i: aten.put(i.few, i.index, i.many, True),
    "put, no sum": lambda i: aten.put(i.few, i.index, i.many, False),
    "put_": lambda i: aten.put_(i.few.clone(), i.index, i.many, True),
    "index_copy": lambda i: aten.index_copy(i.few, 0, i.index, i.many),
    "index_copy of rows": lambda i: aten.index_copy(i.few_rows, 0, i.row_index, i.rows),
    "index_copy_": lambda i: aten.index_copy_(i.few_rows.clone(), 0, i.row_index, i.rows),
    "index_add": lambda i: aten.index_add(i.few, 0, i.index, i.many),
    "index_add of rows": lambda i: aten.index_add(i.few_rows, 0, i.row_index, i.rows),
    "index_fill": lambda i: aten.index_fill(i.few, 0, i.index, 1.0),
    **{
        f"index_reduce {how}": lambda i, how=how: aten.index_reduce(i.few_rows, 0, i.row_index, i.rows, how)
        for how in ("prod", "mean", "amax")
    },
    "scatter": lambda i: aten.scatter(i.few, 0, i.index, i.many),
    "scatter of rows": lambda i: aten.scatter(i.few_rows, 0, i.each_index, i.rows),
    "scatter_add": lambda i: aten.scatter_add(i.few, 0, i.index, i.many),
    "scatter_add of rows": lambda i: aten.scatter_add(i.few_rows, 0, i.row_index[:, None].expand(-1, 100), i.rows),
    **{
        f"scatter_reduce {how}": lambda i, how=how: aten.scatter_reduce(i.few_rows, 0, i.each_index, i.rows, how)
        for how in ("sum", "prod", "mean", "amax")
    },
    "masked_scatter": lambda i: aten.masked_scatter(i.many, i.many > 0, i.many),
    "bincount": lambda i: aten.bincount(i.index, i.many),
    "histc": lambda i: aten.histc(i.many, 20, -300, 300),
    "histogram": lambda i: aten.histogram(i.many, i.bins, weight=i.positive),
    "histogramdd": lambda i: aten._histogramdd_from_bin_tensors(
        i.many.view(-1, 2), [i.bins, i.bins], weight=i.positive[:50_000]
    ),
    "embedding_dense_backward": lambda i: aten.embedding_dense_backward(i.rows, i.row_index, 50, -1, False),
    "_embedding_bag": lambda i: aten._embedding_bag(i.rows[:50], i.row_index, i.bags)[0],
    "segment_reduce": lambda i: aten.segment_reduce(i.rows, "sum", lengths=torch.tensor([300, 700])),
    "max_unpool2d": lambda i: aten.max_unpool2d(i.image, i.image_index, [8, 8]),
    "max_unpool3d": lambda i: aten.max_unpool3d(i.volume, i.volume_index, [4, 4, 4], [1, 1, 1], [0, 0, 0]),
    "grid_sampler_2d_backward": lambda i: aten.grid_sampler_2d_backward(
        i.image, i.image[:, :, :50, :50], i.grid, 0, 0, False, [True, True]
    ),
    "col2im": lambda i: aten.col2im(i.many[: 90 * 1024].view(1, 90, 1024), [34, 34], [3, 3], [1, 1], [0, 0], [1, 1]),
    "unfold_backward": lambda i: aten.unfold_backward(i.rows, [1099], 0, 100, 1),
    "sum": lambda i: aten.sum(i.many),
    "cumsum": lambda i: aten.cumsum(i.many, 0),
    "mm": lambda i: aten.mm(i.rows.t(), i.rows),
    "linalg_lstsq": lambda i: aten.linalg_lstsq(i.rows[:300], i.rows[300:600, :4]),
    "linalg_qr": lambda i: aten.linalg_qr(i.rows[:300]),
    "_linalg_svd": lambda i: aten._linalg_svd(i.rows[:300]),
    "_linalg_solve_ex": lambda i: aten._linalg_solve_ex(i.rows[:100], i.rows[100:200]),
    "native_layer_norm_backward": lambda i: aten.native_layer_norm_backward(
        i.rows, i.rows, [100], i.rows[:, :1], i.rows[:, :1], i.rows[0], i.rows[0], [True] * 3
    ),
}


class _Calls(TorchDispatchMode):
    """Which operators run, and which the recorder would not replay."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if recorder._why_opaque(operator_of(func), args, False) == "nondeterministic on the CPU":
            self.kept.append(str(func))
        return func(*args, **(kwargs or {}))


def _bytes(result: Any) -> list[Tensor]:
    return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tree_leaves(result)]


def _differs(run: Callable[[Inputs], Any], inputs: Inputs) -> bool:
    first = _bytes(run(inputs))
    return any(
        not torch.equal(one, other)
        for _ in range(NUM_RUNS)
        for one, other in zip(first, _bytes(run(inputs)), strict=True)
    )


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_returns_other_bytes_each_time_is_in_the_table(case: str, dtype: torch.dtype) -> None:
    inputs = Inputs(dtype)
    with _Calls() as calls:
        CASES[case](inputs)
    assert calls.kept or not _differs(CASES[case], inputs), "add it to _NONDETERMINISTIC_ON_CPU"


def test_every_operator_in_the_table_is_searched() -> None:
    searched = {name.split(",")[0].split(" ")[0] for name in CASES}
    unsearched = set(operators._NONDETERMINISTIC_ON_CPU) - searched
    assert unsearched == {"_index_put_impl"}  # makes a copy, then calls `_index_put_impl_`


def test_what_needs_several_threads_to_differ_is_replayed_with_one() -> None:
    target, index, source = torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    put, solve = operator_of(aten.index_put.default), operator_of(aten.linalg_lstsq.default)
    assert recorder._why_opaque(put, (target, [index], source), False)
    torch.set_num_threads(1)
    assert not recorder._why_opaque(put, (target, [index], source), False)
    assert recorder._why_opaque(solve, (source[:, None], source[:, None]), False)


PROGRAMS: dict[str, Callable[[Inputs, Tensor], Tensor]] = {
    "index_put": lambda i, x: i.few.index_put((i.index,), x, accumulate=True),
    "index_put_": lambda i, x: i.few.clone().index_put_((i.index,), x, accumulate=True),
    "put": lambda i, x: i.few.put(i.index, x, accumulate=True),
    "put_": lambda i, x: i.few.clone().put_(i.index, x, accumulate=True),
    "backward of indexing": lambda i, x: torch.autograd.grad(
        (few := i.few.clone().requires_grad_())[i.index], few, x, create_graph=True
    )[0],
}


@pytest.mark.parametrize("audit", ["off", "first", "always"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_come_from_the_sums_of_the_forward(program: str, audit: str) -> None:
    inputs = Inputs(torch.float32)
    actckpt.configure(audit=audit)
    for _ in range(NUM_RUNS):
        x = inputs.many.clone().requires_grad_()
        with actckpt.region():
            made = PROGRAMS[program](inputs, x * 1)
            expected = made.detach().cos()[inputs.index]
            result = made.sin()
        del made
        result.sum().backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
