"""Keeps what a library writes to the standard output out of the program's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

__all__ = ["stdout_as_stderr"]

_STDOUT, _STDERR = 1, 2
#: The descriptor is one for all threads.
_lock = threading.Lock()


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Run the body with what is written to the standard output going to the standard error stream.

    HiGHS prints a line of its own there, whatever its options say, and would spoil the JSON of a command. What other
    threads print meanwhile goes there as well: nothing is lost. Where a process has no such streams, nothing changes.
    """
    with _lock:
        try:
            before = os.dup(_STDOUT)
        except OSError:
            yield
            return
        try:
            _flush()
            with contextlib.suppress(OSError):  # there is no standard error stream
                os.dup2(_STDERR, _STDOUT)
            yield
        finally:
            _flush()
            os.dup2(before, _STDOUT)
            os.close(before)


def _flush() -> None:
    """Write out what the C library still holds."""
    ctypes.CDLL(None).fflush(None)
