"""Bytes that policies hold and peak at: the fewest, and no more than torch's selective checkpointing."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from oracle import in_region, plain, theirs
from random_programs import many_draws
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformer_block import Block

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages

aten = torch.ops.aten
KIB = 1024
#: An open region looks through what it holds when that has grown by a sixteenth and 64 KiB.
GROWTH, LEAST_GROWTH = 1 / 16, 64 * KIB
#: Keeps all values but those of one operator.
ALL_BUT_SIN = actckpt.policies.PerOp({aten.sin: Action.RECOMPUTE}, default=Action.KEEP)


@pytest.fixture(autouse=True)
def _unaudited() -> None:
    actckpt.configure(audit="off")  # checksums are held too


def _measured(program: Callable[[], Tensor], policy: Any) -> tuple[int, int]:
    """Return bytes held between forward and backward, and the peak of the step."""
    with LiveStorages() as live:
        with contextlib.nullcontext() if policy is None else actckpt.region(policy):
            loss = program()
        held_bytes = live.live_bytes
        loss.backward()
    return held_bytes, live.peak_bytes


def _operands(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return leaves, which count as parameters, of a product in bfloat16."""
    left, right = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((rows, 8), (8, columns)))
    return left.requires_grad_(), right.requires_grad_()


#: Of a product of 64 KiB.
OPERANDS = _operands(256, 128)


def _thirds() -> Tensor:
    left, right = OPERANDS
    return torch.stack([part.float().exp().sum() for part in (left @ right).chunk(3)]).sum()


def test_float32_values_of_one_bfloat16_product_are_recomputed_together() -> None:
    assert _measured(_thirds, None)[0] >= 128 * KIB
    assert _measured(_thirds, "matmuls")[0] <= 65 * KIB


@many_draws
@given(data=st.data())
def test_values_and_products_are_held_with_the_fewest_bytes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3), label="KiB of each product")
    indices = st.integers(0, len(sizes) - 1)
    values = data.draw(
        st.lists(st.tuples(st.sets(indices, min_size=1), st.integers(1, 12)), min_size=1, max_size=5),
        label="products and rows of each value",
    )

    operands = [_operands(2 * size, 256) for size in sizes]

    def program() -> Tensor:
        products = [left @ right for left, right in operands]  # 512 bytes a row
        loss = torch.zeros(())
        for read, rows in values:
            shortest = min(2 * sizes[i] for i in read)
            total = torch.stack([products[i][: min(rows, shortest)] for i in sorted(read)]).sum(0)
            loss = loss + total.float().exp().sum()
        return loss

    def bytes_if_kept(kept: set[int]) -> int:
        value_rows = [min(rows, *(2 * sizes[i] for i in read)) for read, rows in values]
        leaves = {i for n, (read, _) in enumerate(values) if n not in kept for i in read}
        return sum(value_rows[n] for n in kept) * KIB + sum(sizes[i] for i in leaves) * KIB

    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(values)), n) for n in range(9))
    fewest = min(bytes_if_kept(set(subset)) for subset in subsets)
    assert _measured(program, "matmuls")[0] // KIB == fewest // KIB


def _unsaved_chain() -> Tensor:
    h = torch.randn(256, 256, requires_grad=True).sin()
    for _ in range(40):
        h = h * 2 + 1  # saves nothing
    return h.sum()


def _small_values_of_large_products() -> Tensor:
    left, right = OPERANDS
    loss = torch.zeros(())
    for _ in range(30):
        loss = loss + (left @ right)[:64].float().exp().sum()
    return loss


@pytest.mark.parametrize(
    ("program", "policy"),
    [(_unsaved_chain, ALL_BUT_SIN), (_unsaved_chain, "keep"), (_small_values_of_large_products, "matmuls")],
)
def test_an_open_region_releases_what_no_saved_tensor_needs(program: Callable[[], Tensor], policy: Any) -> None:
    plain = _measured(program, None)[1]
    assert _measured(program, policy)[1] <= plain * (1 + GROWTH) + LEAST_GROWTH


def test_what_a_view_is_on_stays_known_as_what_the_policy_keeps() -> None:
    left, right = OPERANDS
    with actckpt.region("matmuls") as region:
        view = (left @ right).t()
        loss = _unsaved_chain() + view.float().exp().sum() + (view * view).sum()
    loss.backward()
    assert [value.action for value in region.report().values if value.nbytes == 64 * KIB] == [Action.KEEP]


KEPT = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]


def _measure(run: Any) -> tuple[int, int]:
    """Return bytes held after forward, and the peak."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(64) for _ in range(4))
    x = torch.randn(2, 128, 64, requires_grad=True)
    gc.collect()
    with LiveStorages(parameters=[*blocks.parameters(), x]) as live:
        h = x
        for block in blocks:
            h = run(block, h)
        loss = h.square().mean()
        del h
        held = live.live_bytes
        loss.backward()
    return held, live.peak_bytes


@pytest.mark.parametrize("policy", ["recompute", KEPT], ids=["recompute", "matmuls"])
def test_a_policy_per_block_holds_and_peaks_no_higher_than_checkpoint_of_torch(policy: Any) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": contexts} if policy == KEPT else {}
    plainly = _measure(plain)
    torchs = _measure(functools.partial(theirs, **options))
    ours = _measure(in_region(policy))
    print(f"held {ours[0] / plainly[0]:.3f} (torch {torchs[0] / plainly[0]:.3f}), ", end="")
    print(f"peak {ours[1] / plainly[1]:.3f} (torch {torchs[1] / plainly[1]:.3f}) of plain")
    assert ours[0] <= torchs[0] and ours[1] <= torchs[1]
    assert ours[0] < 0.66 * plainly[0]
