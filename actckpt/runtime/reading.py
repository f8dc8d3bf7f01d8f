"""In which order backward reads what was moved, and what is read ahead of it.

NOTE [ Reading ahead ]

Rule 1. The order is that of the last backward of a session that moved the same sizes, else the reverse order
        of moving. Where a session has nothing left, the session before it follows.
Rule 2. What is read ahead and not yet asked for stays within a window of bytes, one for the process.
Rule 3. What a backward read ahead in vain is let go of when it ends, also when it fails: autograd then drops
        the callbacks that it was given without calling them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from actckpt import config
from actckpt.runtime import torch_private
from actckpt.runtime.spans import Span

__all__ = ["Window", "at_end", "learnt_order", "note_order", "window"]

_MAX_LEARNT_ORDERS = 64

_lock = threading.Lock()
#: Orders of earlier backwards, by the sizes that the session moved.
_learnt: "OrderedDict[tuple[int, ...], list[int]]" = OrderedDict()


def learnt_order(sizes: list[int]) -> list[int]:
    """Return the places of a session's spans in the order in which backward will read them (Rule 1)."""
    with _lock:
        return _learnt.get(tuple(sizes)) or list(range(len(sizes) - 1, -1, -1))


def note_order(sizes: list[int], order: Iterable[int]) -> None:
    """Remember the order of a backward that read all of a session's spans."""
    places = list(order)
    if len(places) != len(sizes):
        return
    with _lock:
        _learnt[tuple(sizes)] = places
        _learnt.move_to_end(tuple(sizes))
        while len(_learnt) > _MAX_LEARNT_ORDERS:
            _learnt.popitem(last=False)


class _AtEnd:
    """Runs once: when autograd calls it, or drops it without a call because the backward failed."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def __call__(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    __del__ = __call__


def at_end(run: Callable[[], None]) -> None:
    """Call `run` when the backward under way ends, however it does."""
    if torch_private.queue_callback is not None:
        torch_private.queue_callback(_AtEnd(run))


class Window:
    """What is read ahead and not yet asked for (Rules 2 and 3)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, tuple[Span, int]] = {}  # by id, with the backward that asked for it
        self._bytes = 0
        self._open_tasks: set[int] = set()

    def read_ahead(self, span: Span, task: int) -> bool:
        """Begin to bring `span` back if there is room; returns whether to go on."""
        with self._lock:
            if id(span) in self._spans:
                return True
            if self._bytes + span.nbytes > config.settings().max_inflight:
                return False
            self._spans[id(span)] = span, task
            self._bytes += span.nbytes
            is_new_task = task not in self._open_tasks
            self._open_tasks.add(task)
        if is_new_task:
            at_end(lambda: self._finish(task))
        if not span.prefetch():
            self.asked_for(span)
        return True

    def asked_for(self, span: Span) -> None:
        """`span` is read, or there was no need to: it takes no room any more."""
        with self._lock:
            if self._spans.pop(id(span), None) is not None:
                self._bytes -= span.nbytes

    def _finish(self, task: int) -> None:
        with self._lock:
            self._open_tasks.discard(task)
            unread = [span for span, asked_by in self._spans.values() if asked_by == task]
        for span in unread:
            self.asked_for(span)
            span.unload()


window = Window()
