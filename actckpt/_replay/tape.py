"""The tape of an open region: storage contents, what must be held, and what autograd saved."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._C import Moved, OffloadError, record_version, value_of
from actckpt._core import checksums, torch_private
from actckpt._core.checksums import compact
from actckpt._core.counters import counters
from actckpt._offload import notices, stores
from actckpt._offload.session import Session
from actckpt._replay import aliases
from actckpt._replay.aliases import Seen
from actckpt._replay.call_sites import Site
from actckpt._replay.choice import Choice
from actckpt._replay.lineage import KnownStorage, TapeCore, Value, is_unread
from actckpt._replay.paused import Paused, whole
from actckpt._replay.replayability import Needed, Obtainable
from actckpt._text.places import Place, Selector
from actckpt.action import Action, SavedTensorInfo

__all__ = ["COMPILED", "Tape"]

#: Why results and saved tensors of compiled code are not replayed.
COMPILED = "made by compiled code"


class Tape(TapeCore):
    """Values and steps of one region and of those nested in it (NOTE [ Replay ], Rule 9)."""

    # Class attributes hold the defaults of most regions: each attribute that is set costs time in every region.

    #: The outer hooks get the bytes of kept values too, not only inputs.
    hands_kept_out = True
    #: The pack hook; a nested region recognises this tape by it.
    pack_hook: Any = None
    roots: aliases.VersionAliases | None = None  # see `aliases`
    #: Number of other tapes open around it.
    nesting = 0
    #: Number of nested open regions that record on it.
    depth = 0
    #: By id(), see `wrappers`.
    wrappers: dict[int, Seen] | None = None
    #: Result of packing the token (Rule 6 of NOTE [ Outer hooks ]), which reads what is alive.
    token: Any = None
    #: Values that it wrote in place in external memory without a graph, such as module buffers; None: none.
    written_state: weakref.WeakSet[Value] | None = None
    #: The part of `opaque_bytes` that compiled code made.
    compiled_bytes = 0

    def __init__(self, choice: Choice, outer: torch_private.Hooks | None, site: Site) -> None:
        self.choice = choice
        #: The hooks that were active when the region was opened.
        self.outer = outer
        self._take_settings(site, config.settings())
        self.began_at = torch_private.next_sequence_number()
        self.lock = threading.RLock()

    def _take_settings(self, site: Site, settings: config.Settings) -> None:
        #: The call site, and what is known from its earlier calls.
        self.site = site
        self.modules = site.modules
        self.opaque_places = site.opaque
        self.audited_places = site.audited
        #: See `configure`.
        self.audit = settings.audit
        self.audits_always = settings.audit == "always"
        #: Dropped tensors record checksums (NOTE [ Audit ]).
        self.is_audited = site.begin(self.audit) and not (self.outer is not None and site.has_other_hooks)
        self.opaque_names = settings.opaque
        self.replay_order = settings.replay_order

    # Lazily created, since few regions need them; a region may be as short as two operators.

    @functools.cached_property
    def tasks_inside(self) -> set[int]:
        """Backwards that unpacked something before the region closed."""
        return set()

    @functools.cached_property
    def audited(self) -> list[weakref.ref[Any]]:
        """Handles of dropped tensors that have checksums."""
        return []

    @functools.cached_property
    def obtainable(self) -> Obtainable:
        """Values that can be restored although others were lost."""
        return Obtainable()

    @functools.cached_property
    def needed(self) -> Needed:
        """What saved values are replayed from."""
        return Needed(self.saved)

    @functools.cached_property
    def late_audits(self) -> dict[Value, list[Callable[[], None]]]:
        """What leaves the checksums of candidates (csrc/record/candidates.h)."""
        return {}

    @functools.cached_property
    def _sessions(self) -> dict[bool, Session]:
        """Sessions, by whether packing may wait for room."""
        return {}

    @functools.cached_property
    def _originals(self) -> Session:
        """The session that offloads originals for audits; backward needs them only if an audit fails."""
        return self._watched(Session("auto", min_bytes=0, must=False, is_needed=False))

    # Values

    def new_value(self, nbytes: int, device: torch.device) -> Value:
        """Return a value with the next number."""
        self.num_values += 1
        return Value(nbytes, device, self.num_values)

    def value_of(self, tensor: Tensor) -> Value | None:
        """Return the current value of the storage of `tensor`; an unknown storage becomes an input."""
        return value_of(self, tensor)

    def changed_unseen(self, tensor: Tensor, known: KnownStorage) -> Value:
        """An unrecorded write changed a storage: its contents are opaque now."""
        old = known.value
        if old.step is None:
            self._lose(old)
        old.held = None
        value = self.new_value(old.nbytes, old.device)
        value.action, value.choice = old.action, old.choice
        value.why_opaque = "changed outside of the recorder"
        value.held = tensor
        record_version(value, tensor)
        self.holding.append(value)
        known.value = value
        return value

    def another_version_alias(self, tensor: Tensor, known: KnownStorage) -> Value:
        """See a known value through another alias with its own version counter."""
        if tensor.is_inference():
            self.num_unversioned_args += 1
            self.why_unversioned = _C.WHY_INFERENCE
            return known.value
        if self.roots is None:
            self.roots = weakref.WeakKeyDictionary()
        if aliases.note_root(self.roots, known.value, tensor):
            return known.value
        return self.changed_unseen(tensor, known)

    def why_never(self, value: Value) -> str:
        """Return why a new value must not be replayed at its place; empty if it may be."""
        site, key = self.site, value.key
        if key not in site.modules:
            site.module(key)
        if site.opaque and key in site.opaque:
            return "it came back wrong before"
        if self.opaque_names and value.operator is not None:
            modules = dict.fromkeys((value.module, site.modules.get(key)))  # also one whose forward is called directly
            if any(
                Selector.parse(name).covers(module, value.operator.name)
                for name in self.opaque_names
                for module in modules
            ):
                return "configure(opaque=...) names it"
        return ""

    def protect(self, value: Value | None) -> None:
        """Prepare for a recorded operator that overwrites the storage of a value (NOTE [ Replay ], Rule 1)."""
        if value is None or is_unread(value):  # its bytes are not needed
            return
        if value.candidate_tensor is not None:
            self.audit_late(value)
            value.candidate_tensor = None
        if value.held is None and value.stored is None:
            return
        is_kept = value.step is None or value.action is not Action.RECOMPUTE
        if is_kept and self.needed.has(value):
            self.copy(value)
            return
        if value.step is None:
            self._lose(value)
        value.held = value.stored = None

    def _lose(self, value: Value) -> None:
        self.num_lost += 1
        self.obtainable.lose(value)

    def copy(self, value: Value) -> None:
        """Copy the bytes of a value, and hold the copy instead of the memory that will be overwritten."""
        counters.add("copied_on_write_bytes", value.nbytes)
        with Paused():
            base = value.held
            if base is None:
                assert value.stored is not None
                base = value.stored()
            copied = torch.empty(0, dtype=torch.uint8, device=value.device)
            copied.set_(base.detach().untyped_storage().clone())
            if self.roots is not None:
                self.roots.pop(value, None)  # nobody else has the copy
            if value.stored is not None:
                self.offload(value, copied)
                value.version = -1
            else:
                value.held = copied
                record_version(value, copied)

    def offload(self, value: Value, tensor: Tensor) -> str:
        """Offload the bytes of a value; return why they stay, or an empty text.

        With `PREFER_OFFLOAD` such a value becomes a kept one. With `OFFLOAD` the session's handle holds the bytes.
        """
        if value.action is Action.PREFER_OFFLOAD:
            why = self._prefer_offload(value, tensor)
            value.action = Action.KEEP if why else Action.OFFLOAD
            return why
        packed = self._pack(value, tensor, must=True)
        self._store(value, packed.unpack)
        return "" if isinstance(packed, Moved) else "no store takes it or had room for it"

    def _prefer_offload(self, value: Value, tensor: Tensor) -> str:
        device_type = tensor.device.type
        if why := stores.why_none(device_type):
            notices.tell_no_store(device_type, why)
            return "no store takes tensors of its device"
        packed = self._pack(value, tensor, must=False)
        if not isinstance(packed, Moved):
            return "no store takes it or had room for it at once"
        self._store(value, packed.unpack)
        return ""

    def _pack(self, value: Value, tensor: Tensor, *, must: bool) -> "_C.OffloadHandle":
        session = self._sessions.get(must)
        if session is None:
            session = self._sessions[must] = self._watched(Session("auto", min_bytes=0, must=must))
        with Paused():  # finding out whether a module owns the storage dominates the cost
            return (session.pack_made if value.is_made else session.pack)(whole(tensor))

    def _watched(self, session: Session) -> Session:
        if self.meter is not None:
            session.watch(self.meter)
        return session

    @staticmethod
    def _store(value: Value, stored: Callable[[], Tensor]) -> None:
        value.stored = stored
        value.held = None

    def store_original(self, tensor: Tensor) -> Any:
        """Start to copy the original of a dropped tensor to a store in use; return a loader, or None.

        Also None if the store has no room now, or fails: an audit must neither block nor fail a step.
        """
        if checksums.is_metered() or not stores.is_ready(tensor.device.type):  # a metered step would count the copy
            return None
        try:
            packed = self._originals.pack(compact(tensor.detach()).clone())
        except (OffloadError, torch.OutOfMemoryError):
            return None
        return functools.partial(_expanded, packed, tensor.shape) if isinstance(packed, Moved) else None

    def audit_late(self, value: Value) -> None:
        """Record the checksums of a candidate that is dropped."""
        for begin in self.late_audits.pop(value, ()):
            begin()

    def leave_out_audit(self, value: Value) -> None:
        """Forget the checksums of a candidate that is kept."""
        self.late_audits.pop(value, None)

    def ask_policy(self, value: Value, tensor: Tensor) -> Action:
        """Return the policy's action for a value that is saved for the first time, if no operator entry decides."""
        asked = None if value.choice is None else value.choice.for_value
        return Action.KEEP if asked is None else asked(self.info_of(value, tensor))

    def note_opaque(self, value: Value) -> str:
        """Count a value that is kept although the policy says recompute; return the reason."""
        if not value.is_input:
            counters.add("kept_opaque", 1)
            self.opaque_bytes += value.nbytes
            if value.why_opaque is COMPILED:
                self.compiled_bytes += value.nbytes
        return value.why_opaque or "what it was made from was overwritten"

    def is_obtainable(self, value: Value) -> bool:
        """Whether a value can be made from what was not lost."""
        return self.obtainable.has(value)

    def info_of(self, value: Value, tensor: Tensor) -> SavedTensorInfo:
        """Return what a policy function gets to know about a value."""
        return SavedTensorInfo(
            op=value.operator.func if value.operator is not None else None,
            index=value.index,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=value.nbytes,
            is_input=value.is_input,
            is_parameter=value.is_parameter,
            replayable=_C.can_replay(self, value),
            module=value.module or self.site.modules.get(value.key),
            place=self.place_of(value),
        )

    def place_of(self, value: Value) -> Place | None:
        """Return the place of a value, None if places are not tracked or no recorded step made it."""
        if value.module is None or value.operator is None:
            return None
        return Place(value.module, value.operator.name, value.occurrence, value.result, value.call)


def _expanded(packed: Moved, shape: torch.Size) -> Tensor:
    return packed.unpack().expand(shape)
