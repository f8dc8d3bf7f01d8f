"""The walk over the objects of a call is bounded, and restored containers hold what they held."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actckpt._core.reachable import Contents, Reached, reachable


def test_of_a_long_chain_of_objects_a_bounded_part_is_looked_at() -> None:
    chain = SimpleNamespace(value=torch.zeros(()))
    for _ in range(20_000):
        chain = SimpleNamespace(value=[chain, torch.zeros(())])
    tensors = [each for each in reachable([Reached("", chain)]) if isinstance(each.value, torch.Tensor)]
    assert 0 < len(tensors) < 10_000


def test_classes_are_not_asked_for_attributes() -> None:
    class Asked:
        def __init__(self) -> None:
            self.held = torch.ones(1)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    assert len([*reachable([Reached("", Asked())])]) == 2


class Shouting(dict[str, int]):
    """A dict whose methods do something else."""

    def update(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    clear = copy = values = items = __iter__ = update  # type: ignore[assignment]


@pytest.mark.parametrize(
    "container",
    [
        [1, 2],
        {"a": 1, "b": 2},
        OrderedDict(a=1, b=2),
        defaultdict(int, a=1),
        Counter(a=2),
        {1, 2},
        deque([1, 2], maxlen=2),
        Shouting(a=1),
    ],
    ids=lambda container: type(container).__name__,
)
def test_containers_get_back_what_they_held(container: Any) -> None:
    base = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))
    held = list(base.items(container)) if issubclass(base, dict) else list(container)
    contents = Contents([container])
    base.clear(container)
    with contents.restored():
        assert (list(base.items(container)) if issubclass(base, dict) else list(container)) == held
    assert base.__len__(container) == 0


class Slotted:
    """Holds one value in a slot, may hold another, and has attributes."""

    __slots__ = ("__dict__", "first", "second")


def test_objects_get_back_what_attributes_and_slots_held() -> None:
    one = Slotted()
    one.first, one.attribute = 1, 2  # type: ignore[attr-defined]
    contents = Contents.of(reachable([Reached("", one)]))
    one.first, one.second, one.attribute = 3, 4, 5  # type: ignore[attr-defined]
    contents.restore()
    assert (one.first, one.attribute, hasattr(one, "second")) == (1, 2, False)  # type: ignore[attr-defined]
