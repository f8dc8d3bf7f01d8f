"""Python code that runs in the middle of a call of the extension takes away what the call is about."""

from __future__ import annotations

import pytest

from actckpt import _C


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
