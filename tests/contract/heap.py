"""What the C library has given out. Resident memory would depend on the size of pages, too."""

from __future__ import annotations

import ctypes

import pytest

#: Fields of `struct mallinfo2` of glibc.
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocated_bytes() -> int:
    """Return the bytes in use, on the heap and in mappings of the allocator; skip the test where nothing tells them."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("the C library does not tell what is allocated")
    library.mallinfo2.restype = _Info
    info = library.mallinfo2()
    return int(info.hblkhd + info.uordblks)
