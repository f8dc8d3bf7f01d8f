"""Views that overlap in part: each byte is copied out once, and every view comes back as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from internals.stores import flush
from offload_oracle import assert_same, unique_saved_bytes
from oracle import leaf

import actckpt
from actckpt.errors import SavedTensorChangedError

ROWS, COLUMNS = 64, 16


pytestmark = pytest.mark.usefixtures("kind")


def _windows(*stretches: tuple[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(h: torch.Tensor) -> torch.Tensor:
        return torch.stack([h[first:last].sin().sum() for first, last in stretches]).sum()

    return program


_PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half over": _windows((0, 16), (8, 24)),
    "half over, backwards": _windows((8, 24), (0, 16)),
    "around": _windows((8, 12), (0, 24)),
    "over two": _windows((0, 8), (16, 24), (4, 20)),
    "then all of it": _windows((4, 12), (0, 64)),
    "all of it, then a part": _windows((0, 64), (4, 12)),
    "sliding": _windows(*((n, n + 8) for n in range(0, 40, 3))),
    "side by side": _windows((0, 8), (8, 16), (4, 12)),
    "of another dtype": lambda h: h[0:16].sin().sum() + torch.view_as_complex(h.view(-1, 2)[60:200]).abs().sum(),
    "columns": lambda h: h.view(-1)[8:400].view(-1, 4)[:, 1:3].sin().sum() + h[20:40].exp().sum(),
}


@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "in flight"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_gradients_are_bit_equal(name: str, is_flushed: bool) -> None:
    def program(context: Callable[[], Any]) -> Any:
        x = leaf(ROWS, COLUMNS)
        with context():
            y = _PROGRAMS[name](x * 1.5)
        if is_flushed:
            flush()
        return [*torch.autograd.grad(y, x, retain_graph=True), *torch.autograd.grad(y, x)]

    assert_same(program)


@pytest.mark.parametrize("name", [name for name in _PROGRAMS if name != "columns"])
def test_each_byte_is_copied_once(name: str) -> None:
    h = leaf(ROWS, COLUMNS) * 1.5
    saved_bytes, storage_bytes = unique_saved_bytes(lambda: _PROGRAMS[name](h), [])
    with actckpt.offload(min_bytes=0):
        y = _PROGRAMS[name](h)
    moved = actckpt.stats().offloaded_bytes
    assert moved == saved_bytes or (saved_bytes * 2 >= storage_bytes and moved <= storage_bytes)
    del y


def test_a_small_view_of_a_large_storage_moves_no_more_than_itself() -> None:
    h = leaf(1 << 16) * 1.5
    with actckpt.offload(min_bytes=0):
        y = h[100:200].sin().sum() + h[150:250].sin().sum()
    assert actckpt.stats().offloaded_bytes == 150 * 4
    del y


@pytest.mark.parametrize("seed", range(30))
def test_random_stretches_come_back_in_any_order(seed: int) -> None:
    def program(context: Callable[[], Any]) -> Any:
        chooser = random.Random(seed)
        firsts = [chooser.randrange(ROWS) for _ in range(chooser.randrange(2, 12))]
        x = leaf(ROWS, COLUMNS)
        with context():
            h = x * 1.5
            outputs = [h[first : first + chooser.randrange(1, 24)].sin().sum() for first in firsts]
        flush()
        chooser.shuffle(outputs)
        return [torch.autograd.grad(output, x, retain_graph=True)[0] for output in outputs]

    assert_same(program)


def test_a_change_between_two_overlapping_views_is_not_joined() -> None:
    """The second view's bytes are newer: it shares nothing, and the first raises."""
    x, h = leaf(16, COLUMNS), torch.randn(ROWS, COLUMNS)
    with actckpt.offload(min_bytes=0):
        one = (x * h[0:16]).sum()
        h.add_(1)
        other = (x * h[8:24]).sum()
    flush()
    assert torch.equal(torch.autograd.grad(other, x)[0], h[8:24])
    with pytest.raises(SavedTensorChangedError):
        torch.autograd.grad(one, x)
