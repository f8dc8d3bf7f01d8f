"""The walk over the objects of a call is bounded, and restored containers hold what they held."""

from __future__ import annotations

from typing import Any

import torch

from actckpt._core.reachable import Contents, Reached, reachable


def test_classes_are_not_asked_for_attributes() -> None:
    class Asked:
        def __init__(self) -> None:
            self.held = torch.ones(1)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    assert len([*reachable([Reached("", Asked())])]) == 2


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
