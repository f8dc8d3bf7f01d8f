"""What objects lead to is found, and what containers hold is put back."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from actckpt._core.contents import Contents


class Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_containers_and_attributes_are_put_back() -> None:
    made: list[Any] = [[1, 2], {"a": 1}, {1}, deque([1, 2], maxlen=2), OrderedDict(a=1, b=2), defaultdict(list, a=1)]
    made += [Counter(a=2), Holder(value=1)]
    inner = [3]
    contents = Contents(made, lambda: inner)
    made[0].append(3)
    made[1]["b"] = 2
    made[2].add(2)
    made[3].append(3)
    made[4].move_to_end("a")
    made[5]["new"]
    made[6].update("ab")
    made[7].value, made[7].other = 2, 3
    inner.clear()
    contents.put_back()
    assert made[:4] == [[1, 2], {"a": 1}, {1}, deque([1, 2])]
    assert list(made[4]) == ["a", "b"] and dict(made[5]) == {"a": 1} and made[6] == {"a": 2}
    assert vars(made[7]) == {"value": 1} and inner == [3]


def test_tensors_and_generators_are_found_each_once_and_modules_left_out() -> None:
    tensor, generator, module = torch.ones(1), torch.Generator(), torch.nn.Linear(2, 2)
    contents = Contents([tensor, Holder(again=tensor, deep={"g": [generator]}), module])
    assert contents.tensors == [tensor] and contents.generators == [generator]


def test_what_has_a_lock_keeps_what_it_has() -> None:
    held = Holder(lock=threading.Lock(), value=1)
    contents = Contents(held)
    held.value = 2
    contents.put_back()
    assert held.value == 2
