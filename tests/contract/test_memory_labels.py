"""`label_memory`: what operators allocate is called by operator and module, and by what brings it back."""

from __future__ import annotations

import types
from collections.abc import Iterator

import on_device
import pytest
import torch
from internals.notices import forget_told
from oracle import assert_equal
from test_budgets import Training
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt
from actckpt import memory_labels


class Allocator(TorchDispatchMode):
    """Stands for an allocator that takes labels: notes what is set while an operator runs."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.label = label
        self.seen: list[str] = []

    def set(self, label: str) -> None:
        self.label = label

    def get(self) -> str:
        return self.label

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.label)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator("of the program")
    accelerator = types.SimpleNamespace(memory_labels=lambda: allocator)
    monkeypatch.setattr(memory_labels, "devices", types.SimpleNamespace(available=lambda: accelerator))
    actckpt.configure(observers=[Allocator])
    with allocator:
        yield allocator


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_what_is_kept_and_what_is_brought_back_are_labelled(policy: str, allocator: Allocator) -> None:
    training = Training()
    expected = training.gradients()
    actckpt.apply(training.model, policy=policy)
    training.step()
    allocator.seen.clear()
    with actckpt.label_memory():
        found = training.gradients()
    assert_equal(found, expected)
    assert allocator.label == "of the program"
    labels = set(allocator.seen)
    assert "actckpt: aten.addmm.default in blocks.2.up" in labels
    assert any(label.startswith("actckpt: again aten.gelu.default") for label in labels)
    assert any(label.startswith("actckpt: again aten.addmm.default") for label in labels) == (policy == "recompute")


@pytest.mark.usefixtures("no_audit")
def test_what_offloading_brings_back_is_labelled(allocator: Allocator) -> None:
    if on_device.device_type == "cpu":
        pytest.skip("labels are for allocators of devices")
    training = Training()
    expected = training.gradients()
    actckpt.apply(training.model, policy="offload", min_bytes=0)
    training.step()
    allocator.seen.clear()
    with actckpt.label_memory():
        found = training.gradients()
    assert_equal(found, expected)
    assert "actckpt: again, offloaded" in allocator.seen


def test_labels_of_the_program_are_back_after_an_error(allocator: Allocator) -> None:
    with pytest.raises(KeyError), actckpt.label_memory():
        torch.ones(2)
        raise KeyError
    assert allocator.label == "of the program" and "actckpt: aten.ones.default" in allocator.seen


def test_where_nothing_is_labelled_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_told(monkeypatch)
    told = pytest.warns(UserWarning, match="nothing is labelled.*(there is no device|labels no memory there)")
    with told as warned:
        for _ in range(2):
            with actckpt.label_memory():
                torch.ones(2)
    assert len(warned) == 1
