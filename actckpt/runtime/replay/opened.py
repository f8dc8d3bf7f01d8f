"""Opening and closing regions: the recorder and the hooks of a thread, and how regions nest."""

import functools
import threading
from typing import Any

from actckpt._frames import pack_recorded, unpack_recorded
from actckpt.action import Action
from actckpt.runtime import offload, torch_private
from actckpt.runtime.replay import saved
from actckpt.runtime.replay.audit import site_of
from actckpt.runtime.replay.choice import Choice
from actckpt.runtime.replay.recorder import Recorder
from actckpt.runtime.replay.report import Figures
from actckpt.runtime.replay.tape import Tape

__all__ = ["OpenRegion"]


#: Recorders that are active in this process, in any thread.
num_recorders = [0]


class _Local(threading.local):
    tape: Tape | None = None

    def __init__(self) -> None:
        #: Modes that no region uses now; making one takes as long as recording several operators.
        self.idle: list[Recorder] = []


_local = _Local()


class OpenRegion:
    """A region between its opening and its closing.

    Args:
        choice: the policy.
        caller: what names the place that opens it, see `audit.site_of`.
        figures: gets what the report says.
        respects_hooks: whether the hooks that are active where it is opened get the bytes of what it keeps, not only
            of its inputs.
    """

    __slots__ = ("_has_hooks", "_outer_choice", "_outer_tape", "_recorder", "tape")

    def __init__(
        self, choice: Choice, caller: Any, figures: Figures | None = None, *, respects_hooks: bool = True
    ) -> None:
        outer_hooks = torch_private.outer_hooks()
        current = _local.tape
        self._outer_tape = current
        if current is not None and outer_hooks is not None and outer_hooks[0] is current.pack_hook:
            self.tape: Tape | None = current  # Rule 11
            self._outer_choice: Choice | None = current.choice
            current.choice = choice
            self._recorder: Recorder | None = None
            self._has_hooks = False
            return
        self._outer_choice = None
        self._recorder = None
        self.tape = None
        if choice.always is Action.KEEP:
            self._has_hooks = False
            return
        self._has_hooks = True
        if choice.always is Action.OFFLOAD:
            session = offload.Session("auto", offload.DEFAULT_MIN_BYTES)
            if figures is not None:
                figures.watch(session)
            torch_private.push_hooks(*session.hooks)
            return
        self.tape = tape = Tape(choice, outer_hooks, site_of(caller))
        if figures is not None:
            tape.entries, tape.meter = figures.entries, figures.meter
        tape.hands_kept_out = respects_hooks
        tape.pack_hook = functools.partial(pack_recorded, tape)
        self._recorder = _local.idle.pop() if _local.idle else Recorder()
        self._recorder.tape = tape
        torch_private.push_hooks(tape.pack_hook, unpack_recorded)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        _local.tape = tape
        num_recorders[0] += 1

    def why_not_recorded(self) -> str:
        """Return why a report of this region has no rows, an empty text if it may have some."""
        if self._outer_choice is not None:
            return "Not recorded here: the region around this one records for it, and its report has both."
        if self.tape is not None:
            return ""
        if self._has_hooks:
            return "Not recorded: policy 'offload' moves all values. actckpt.stats() counts them."
        return "Not recorded: policy 'keep' leaves all values to autograd."

    def close(self, *, has_failed: bool) -> None:
        """End the region. What it needs is held from here on."""
        if self._outer_choice is not None and self.tape is not None:
            self.tape.choice = self._outer_choice
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._has_hooks:
            torch_private.pop_hooks()
        if self._recorder is None or self.tape is None:
            return
        num_recorders[0] -= 1
        self._recorder.tape = None
        _local.idle.append(self._recorder)
        self._recorder = None
        _local.tape = self._outer_tape
        if has_failed:
            self.tape.outer = None  # what is left of the graph, if anything, belongs to who catches the error
        self.tape.pack_hook = None  # refers to the tape
        saved.settle(self.tape)
