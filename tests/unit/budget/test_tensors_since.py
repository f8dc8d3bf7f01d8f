"""Tensors that a program has made since some moment, and holds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from actckpt._budget.tensors_since import TensorsSince


@pytest.mark.parametrize("collected", [None, 0, 1, 2])
def test_what_was_made_since_and_is_held_is_found(collected: int | None) -> None:
    old, before = torch.ones(2), []
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False) as mode:  # as compilers leave them
        fake = mode.from_tensor(torch.ones(6))
    gc.collect()
    before.append(torch.ones(3))
    since = TensorsSince()
    held = [torch.ones(4), before[0].view(3, 1)]
    torch.ones(5)
    if collected is not None:
        gc.collect(collected)
    found, is_exact = since.found()
    ids = set(map(id, found))
    assert is_exact == (collected in (None, 0))
    assert {id(each) for each in held} <= ids and not {each.numel() for each in found} & {5}
    assert id(before[0]) not in ids and id(fake) not in ids
    if is_exact:
        assert ids == {id(each) for each in held} and id(old) not in ids


def test_nothing_is_kept_alive() -> None:
    held = [torch.ones(2)]
    storage = weakref.ref(held[0].untyped_storage())
    gc.disable()
    try:
        since = TensorsSince()
        held.append(torch.ones(3))
        other = weakref.ref(held[1].untyped_storage())
        assert len(since.found()[0]) == 1
        held.clear()
        assert storage() is None and other() is None
    finally:
        gc.enable()
