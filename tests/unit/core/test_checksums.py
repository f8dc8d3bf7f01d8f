"""Checksums of strided memory: each element that a view shows counts once, and nothing else does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._core.checksums import (
    _checksum as checksum,  # which modes see
    are_close,
    compact,
    sums,
)
from actckpt.memory import LiveStorages

MIB = 2**20
SIZES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]


def _random_view(seed: int) -> tuple[Tensor, Tensor]:
    """Return the memory of a random view, which may be expanded, may overlap and may have gaps, and the view."""
    chosen = random.Random(seed)
    memory = torch.arange(4096, dtype=torch.int32)
    dims = chosen.randint(0, 4)
    shape = [chosen.choice((1, 2, 3, 5)) for _ in range(dims)]
    stride = [chosen.choice((0, 1, 2, 3, 5, 6, 15, 30)) for _ in range(dims)]
    return memory, memory.as_strided(shape, stride, chosen.randint(0, 50))


class _CountSums(TorchDispatchMode):
    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.sum.default, torch.ops.aten.dot.default):
            self.num_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", range(100))
def test_it_changes_with_each_element_of_the_view_and_with_no_other(seed: int) -> None:
    memory, view = _random_view(seed)
    shown = set(view.reshape(-1).tolist())
    before = checksum(view)
    for place in range(0, 400, 1 + seed % 3):
        memory[place] ^= 1 << 9
        assert torch.equal(checksum(view), before) is (place not in shown), (place, view.shape, view.stride())
        memory[place] ^= 1 << 9
    assert torch.equal(memory, torch.arange(4096, dtype=torch.int32))


@pytest.mark.parametrize("dtype", SIZES)
def test_it_tells_elements_that_changed_places(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 70_000).to(dtype)
    tensor[1, 5] = 1
    before = checksum(tensor)
    assert torch.equal(checksum(tensor.clone()), before)
    for other in ((1, 6), (2, 5), (0, 69_999)):
        moved = torch.zeros(3, 70_000).to(dtype)
        moved[other] = 1
        assert not torch.equal(checksum(moved), before)
    if dtype.is_complex:
        assert not torch.equal(checksum(tensor * 1j), before)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("num_elements", [7, 8, 70_001, 70_008])
def test_it_is_the_same_wherever_the_tensor_begins(dtype: torch.dtype, num_elements: int) -> None:
    memory = torch.arange(num_elements + 8).to(dtype)
    expected = checksum(memory[:num_elements].clone())
    for begin in range(1, 9):
        shifted = torch.cat([torch.zeros(begin, dtype=dtype), memory[:num_elements]])[begin:]
        assert torch.equal(checksum(shifted), expected), begin


def test_what_expanding_repeats_is_read_once() -> None:
    matrix = torch.randn(512, 512)
    windows = torch.randn(100_000).unfold(0, 64, 1)
    for view, nbytes in ((matrix.expand(64, 512, 512), MIB), (matrix.t().expand(8, 512, 512), MIB), (windows, 400_000)):
        with LiveStorages() as live, _CountSums() as sums:
            checksum(view)
        assert live.peak_bytes <= 2**19 + 2**10
        assert sums.num_elements == nbytes / 8, "of two elements at once"


@pytest.mark.parametrize("shape", [(4 * MIB,), (2048, 2048), (3, 1_000_000), (4_000_000, 1), (1000, 10, 400)])
def test_temporaries_are_a_small_part_of_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    for view in (tensor, tensor[..., ::2], tensor.mT if tensor.dim() > 1 else tensor):
        with LiveStorages() as live:
            checksum(view)
        assert live.peak_bytes <= tensor.nbytes / 8


def test_a_compact_view_expands_to_the_tensor() -> None:
    tensor = torch.randn(1, 5, 1).expand(3, 5, 4)
    assert compact(tensor).untyped_storage() is tensor.untyped_storage()
    assert compact(tensor).clone().nbytes == 5 * 4
    assert torch.equal(compact(tensor).clone().expand(tensor.shape), tensor)


def test_another_order_is_not_taken_for_rounding() -> None:
    for size in (31, 257, 1000):
        x = torch.linspace(0.1, 0.9, size).exp()
        of_x = sums(x)
        assert are_close(of_x, sums(x + 1e-7 * x), x.dtype)
        assert not any(are_close(of_x, sums(x.roll(shift)), x.dtype) for shift in range(1, size))
