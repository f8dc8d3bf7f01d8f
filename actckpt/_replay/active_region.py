"""Open and close regions: the recorder and the hooks of a thread, and how regions nest.

NOTE [ Opening and closing ]

Opening a region pushes hooks and a dispatch mode on this thread, and sets its tape. Either all of that happens or none,
because a signal handler may raise at any line. So `__enter__` and `__exit__` are `all_or_nothing`. If one of them does
not finish, `unwind` restores the thread. It reads the thread's actual state, not what was planned.

A region is closed in the thread that opened it, after everything that was opened inside it.
"""

import functools
import threading
import weakref
from typing import Any

from torch import Tensor

from actckpt._C import (
    Calls,
    all_or_nothing,
    pack_recorded,
    strided_storage_of,
    unknown_modes,
    unpack_recorded,
)
from actckpt._core import messages, modes, torch_private
from actckpt._core.hooks import get_all_leaves
from actckpt._core.region_report import Figures
from actckpt._offload.session import DEFAULT_MIN_BYTES, Session
from actckpt._replay import saved_tensor_hooks
from actckpt._replay.call_sites import Site, site_of
from actckpt._replay.choice import Choice
from actckpt._replay.named_operators import Matches
from actckpt._replay.recorder import Recorder, WatchingRecorder
from actckpt._replay.tape import Tape
from actckpt.action import Action
from actckpt.errors import StillOpenError

__all__ = ["OpenRegion"]


#: Tapes that are recording, in any thread.
recording: set[Tape] = set()


class _Local(threading.local):
    tape: Tape | None = None

    def __init__(self) -> None:
        #: Module calls of this step (NOTE [ Places ]), by the number of enclosing tapes.
        self.calls: dict[int, weakref.ref[Calls]] = {}
        #: Modes that no region uses now. Creating one costs as much as recording several operators.
        self.idle: list[Recorder] = []


_local = _Local()


def _calls_of(nesting: int, where: str, counts_anew: bool, looks_up_calls: bool) -> Calls:
    """Return the module calls of the current step, or new ones, for a region that opens."""
    if counts_anew:
        calls = Calls()
        calls.begin(where)
        if looks_up_calls:
            calls.look_up_all()
        return calls
    reference = _local.calls.get(nesting)
    known = None if reference is None else reference()
    if known is None or known.is_over:
        known = Calls()
        _local.calls[nesting] = weakref.ref(known)
    known.begin(where)
    return known


def _push(hooks: torch_private.Hooks) -> None:
    try:
        torch_private.push_hooks(*hooks)
    except RuntimeError as error:
        messages.raise_if_hooks_are_refused(error, "region")
        raise


class OpenRegion:
    """A region as a context manager. See NOTE [ Opening and closing ].

    Args:
        choice: the policy.
        caller: the call site, or an object that identifies it; see `call_sites.site_of`.
        figures: receives the numbers for the report.
        respects_hooks: the hooks active at opening get the bytes of kept values too, not only of inputs.
        arguments: arguments of the wrapped call, which can run again; None: the region wraps arbitrary code.
        matches: receives the operators that ran, of those that the policy names; None: the site does, and warns.
        counts_anew: places count module calls within this region only (NOTE [ Places ]).
        looks_up_calls: with `counts_anew`, do not reuse module calls remembered from regions with the same first
            operator.
        is_block: everything that this backward needs again stays cached (NOTE [ Windows ]).
    """

    __slots__ = (
        "_arguments",
        "_caller",
        "_choice",
        "_counted",
        "_counts_anew",
        "_depth",
        "_figures",
        "_hooks",
        "_is_block",
        "_looks_up_calls",
        "_outer_calls",
        "_outer_choice",
        "_outer_tape",
        "_recorder",
        "_respects_hooks",
        "_thread",
        "compiled",
        "matches",
        "tape",
    )

    def __init__(
        self,
        choice: Choice,
        caller: Any,
        figures: Figures | None = None,
        *,
        respects_hooks: bool = True,
        arguments: tuple[Any, ...] | None = None,
        matches: Matches | None = None,
        counts_anew: bool = False,
        looks_up_calls: bool = False,
        is_block: bool = False,
    ) -> None:
        self._choice = choice
        self._caller = caller
        self._figures = figures
        self._respects_hooks = respects_hooks
        self._arguments = arguments
        self._counts_anew, self._looks_up_calls = counts_anew, looks_up_calls
        self._is_block = is_block
        self._thread = threading.get_ident()
        self._hooks: torch_private.Hooks | None = None
        self._recorder: Recorder | None = None
        #: Which operators named by the policy ran; None if it names none, or nothing is recorded here.
        self.matches = matches
        self._outer_choice: Choice | None = None
        self._outer_calls: Calls | None = None
        self._outer_tape: Tape | None = None
        #: Equals `Tape.depth` while this is the innermost region on the tape.
        self._depth = 0
        #: Counters of a shared tape at opening.
        self._counted = (0, 0, 0)
        self.tape: Tape | None = None
        #: Bytes to recompute that compiled code made, and all bytes to recompute; set if the share is large.
        self.compiled: tuple[int, int] | None = None

    def _enter(self) -> "OpenRegion":
        outer_hooks = torch_private.outer_hooks()
        current = _local.tape
        if current is not None and outer_hooks is not None and outer_hooks[0] is current.pack_hook:
            self._share(current)
        elif (always := self._choice.always) is Action.OFFLOAD:
            session = Session("auto", DEFAULT_MIN_BYTES)
            if self._figures is not None:
                self._figures.watch(session)
            self._hooks = session.hooks
            _push(self._hooks)
        elif always is not Action.KEEP:
            self._record(current, outer_hooks)
        return self

    def _share(self, current: Tape) -> None:
        """Record on the tape of the enclosing region (NOTE [ Replay ], Rule 9)."""
        self._counted = (current.recompute_bytes, current.opaque_bytes, current.compiled_bytes)
        self._outer_choice = current.choice
        self._depth = current.depth + 1
        self.tape = current
        current.choice, current.depth = self._choice, self._depth
        self._outer_calls = current.calls
        if self._choice.asks_places and (current.calls is None or self._counts_anew):
            current.calls = _calls_of(current.nesting, current.site.where, self._counts_anew, self._looks_up_calls)

    def _record(self, current: Tape | None, outer_hooks: torch_private.Hooks | None) -> None:
        """Start a tape and record this thread on it."""
        site = self._caller if isinstance(self._caller, Site) else site_of(self._caller)
        tape = Tape(self._choice, outer_hooks, site)
        if unknown := unknown_modes():
            modes.warn(unknown)
            tape.why_opaque = modes.why_kept(unknown[-1])
        if self._figures is not None:
            tape.entries, tape.meter = self._figures.entries, self._figures.meter
            self._figures.site = site
        tape.hands_kept_out = self._respects_hooks
        if outer_hooks is not None and self._arguments is not None and not get_all_leaves(outer_hooks):
            storages = [strided_storage_of(value) for value in self._arguments if isinstance(value, Tensor)]
            tape.argument_storages = set(map(id, storages))
        tape.has_windows = not self._is_block
        tape.pack_hook = functools.partial(pack_recorded, tape)
        tape.nesting = 0 if current is None else current.nesting + 1
        if self._choice.asks_places or tape.opaque_names or (self._figures is not None and site.asks_places(tape)):
            tape.calls = _calls_of(tape.nesting, site.where, self._counts_anew, self._looks_up_calls)
        self._outer_tape = current
        self._hooks = tape.pack_hook, unpack_recorded
        self._recorder = self._watching(site) or (_local.idle.pop() if _local.idle else Recorder())
        self._recorder.tape = self.tape = tape
        _push(self._hooks)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        _local.tape = tape
        recording.add(tape)

    def _exit(self, kind: type[BaseException] | None, *_: object) -> None:
        self._check_can_close()
        if self._arguments is not None and kind is None:
            self.compiled = self._take_compiled_bytes()
        if self._outer_choice is not None:
            assert self.tape is not None
            self._leave_shared(self.tape, self._outer_choice)
            return
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._hooks is not None:
            torch_private.pop_hooks()
        if self._recorder is None or self.tape is None:
            return
        recording.discard(self.tape)
        _local.tape = self._outer_tape
        self._recorder.tape = None
        if isinstance(self._recorder, WatchingRecorder):
            has_compiled = self.compiled is not None or self.tape.compiled_bytes > 0
            self._recorder.matches.see(self.tape, has_compiled=has_compiled)
        else:
            _local.idle.append(self._recorder)
        self._recorder = None
        self._close_tape(has_failed=kind is not None)

    def _leave_shared(self, tape: Tape, outer_choice: Choice) -> None:
        tape.choice, tape.depth = outer_choice, self._depth - 1
        if self._counts_anew and tape.calls is not self._outer_calls:
            assert tape.calls is not None
            tape.calls.end()
            tape.calls = self._outer_calls

    def _watching(self, site: Site) -> Recorder | None:
        """Return a recorder that notes which operators of the policy run; None if that is known or not wanted."""
        if not self._choice.operators:
            return None
        if self.matches is None:
            self.matches = site.matches
        return WatchingRecorder(self.matches) if self.matches.is_watching(self._choice) else None

    def unwind(self, error: BaseException) -> None:
        """Restore the thread's state, however far opening or closing got."""
        if isinstance(error, StillOpenError) or threading.get_ident() != self._thread:
            return
        if self._outer_choice is not None and self.tape is not None:
            self._leave_shared(self.tape, self._outer_choice)
            return
        if self._recorder is not None:
            torch_private.remove_dispatch_mode(self._recorder)
            self._recorder.tape = None
            self._recorder = None  # not reusable: torch keeps flags in it
        if torch_private.are_on_top(self._hooks):
            torch_private.pop_hooks()
        if self.tape is not None and self._hooks is not None:
            recording.discard(self.tape)
            if _local.tape is self.tape:
                _local.tape = self._outer_tape
            self._close_tape(has_failed=True)
        self._hooks = None

    __enter__ = all_or_nothing(_enter, unwind)
    __exit__ = all_or_nothing(_exit, unwind)

    def _close_tape(self, *, has_failed: bool) -> None:
        assert self.tape is not None
        if has_failed:
            self.tape.outer = None  # whoever catches the error owns what is left of the graph
        if self.tape.calls is not None:
            self.tape.calls.end()
            self.tape.calls.is_over |= has_failed
        self.tape.pack_hook = None  # breaks the cycle: the hook refers to the tape
        saved_tensor_hooks.close(self.tape)

    def _check_can_close(self) -> None:
        if self._hooks is None and self._outer_choice is None:
            return
        if threading.get_ident() != self._thread:
            raise StillOpenError(
                f"This region was opened in thread {self._thread} and is being closed in thread "
                f"{threading.get_ident()}. What it set (saved-tensor hooks, a dispatch mode) only the first can undo: "
                "close it there, `region.__exit__(None, None, None)` does it. It is still open."
            )
        is_innermost = self.tape is None or self.tape.depth == self._depth
        if self._hooks is not None:
            is_innermost = is_innermost and torch_private.are_on_top(self._hooks)
        if not is_innermost:
            raise StillOpenError(
                "This region is being closed before what was opened in it: another region, or saved-tensor hooks. "
                "Close those first. It is still open."
            )

    def why_not_recorded(self) -> str:
        """Return why a report of this region has no rows; empty if it may have some."""
        if self._outer_choice is not None:
            return "Not recorded here: the region around this one records for it, and its report has both."
        if self.tape is not None:
            return ""
        if self._hooks is not None:
            return "Not recorded: policy 'offload' moves all values. actckpt.stats() counts them."
        return "Not recorded: policy 'keep' leaves all values to autograd. region('keep', record=True) records them."

    def _take_compiled_bytes(self) -> tuple[int, int] | None:
        """Return and clear `compiled`; the caller warns the user."""
        tape = self.tape
        if tape is None or not tape.compiled_bytes:
            return None
        recompute, opaque, compiled = self._counted
        compiled_bytes = tape.compiled_bytes - compiled
        total_bytes = tape.recompute_bytes + tape.opaque_bytes - recompute - opaque
        if not saved_tensor_hooks.is_much(compiled_bytes, total_bytes):
            return None
        tape.opaque_bytes -= compiled_bytes
        tape.compiled_bytes -= compiled_bytes
        return compiled_bytes, total_bytes
