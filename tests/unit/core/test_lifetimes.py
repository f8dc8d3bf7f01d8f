"""Python code that runs in the middle of a call of the extension takes away what the call is about."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from actckpt import _C


class _Tells(type):
    """Classes that call a function when they are asked for their module."""

    told: Any = staticmethod(lambda: None)

    @property
    def __module__(cls) -> str:  # type: ignore[override]
        cls.told()
        return "anything"


class _List(list[Any]):
    """Can be referred to weakly."""


@pytest.mark.parametrize("place", ["closure", "default", "keyword default"])
def test_what_a_function_refers_to_lives_until_a_region_has_looked_at_it(place: str) -> None:
    alive = []

    class First(metaclass=_Tells):
        """Comes before what it takes away."""

    def function_and_reference() -> Any:
        first, second = First(), _List([torch.ones(2)])
        reference = weakref.ref(second)
        if place == "closure":

            def function() -> Any:
                return first, second

        elif place == "default":

            def function(first: Any = first, second: Any = second) -> Any: ...

        else:

            def function(*, first: Any = first, second: Any = second) -> Any: ...

        def take_away() -> None:
            nonlocal second
            second = _List()
            function.__defaults__ = None
            function.__kwdefaults__ = None
            alive.append(reference() is not None)

        First.told = staticmethod(take_away)
        return function, reference

    function, reference = function_and_reference()
    structure = _C.Structure((function,), set(), [])
    assert alive and all(alive)
    del structure
    assert reference() is None


def test_a_storage_whose_size_cannot_be_read_is_counted_once_it_can() -> None:
    class Storage:
        """Of which the size cannot be read at first."""

        size: int | None = None

        def nbytes(self) -> int:
            if self.size is None:
                raise RuntimeError("no size")
            return self.size

    meter, storage = _C.Meter(), Storage()
    with pytest.raises(RuntimeError, match="no size"):
        meter.note(storage)
    storage.size = 8
    meter.note(storage)
    assert meter.live_bytes == 8
    del storage
    assert meter.live_bytes == 0
