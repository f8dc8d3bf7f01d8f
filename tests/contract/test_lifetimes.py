"""Python code that runs in the middle of a call of the extension takes away what the call is about."""

from __future__ import annotations

from typing import Any

import pytest

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
