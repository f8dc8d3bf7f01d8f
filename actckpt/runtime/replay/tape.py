"""The tape of an open region: what its storages hold, what must be held, and what autograd saves of it."""

import fnmatch
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from actckpt import config
from actckpt.action import Action
from actckpt.runtime import offload, stores, torch_private
from actckpt.runtime.counters import counters
from actckpt.runtime.replay.audit import Site
from actckpt.runtime.replay.choice import Choice
from actckpt.runtime.replay.lineage import Block, Step, Value, is_obtainable
from actckpt.runtime.replay.report import Entry

__all__ = ["Paused", "Tape", "paused", "version_of"]

#: Threads in which every recorder stands aside, and how many times over.
paused: dict[int, int] = {}


class Tape:
    """Values and steps of one region and of those nested in it (Rule 11 of NOTE [ Replay ])."""

    def __init__(self, choice: Choice, outer: torch_private.Hooks | None, site: Site) -> None:
        settings = config.settings()
        self.choice = choice
        #: The hooks that were active where the region was opened.
        self.outer = outer
        #: The pack hook, by which a region inside recognises this one.
        self.pack_hook: Any = None
        self.is_open = True
        #: By id() of the storage, checked by identity (Rule 2).
        self.blocks: dict[int, Block] = {}
        #: Values that hold their bytes while the region is open.
        self.holding: list[Value] = []
        #: Values that autograd saved.
        self.saved: list[weakref.ref[Value]] = []
        #: Values that are dropped, but whose bytes stay until the region closes (see `settle`).
        self.candidates: list[Value] = []
        #: Values whose bytes are gone although nothing makes them again.
        self.num_lost = 0
        #: Bytes of saved values that the policy wants recomputed: those that can be, and those that cannot.
        self.recompute_bytes = 0
        self.opaque_bytes = 0
        self.num_values = 0
        self.lock = threading.RLock()
        #: The swap within whose rerun the region is made, -1: no operator that replay must swap states for.
        self.swap = -1
        #: Where it was opened, what it has run so far, and whether dropped tensors leave checksums (Rule 6).
        self.site = site
        self.structure = 0
        self.is_audited = site.begin(settings.audit)
        self.audits_always = settings.audit == "always"
        self.audited: list[weakref.ref[Any]] = []
        self.num_packed = 0
        #: Names whose values are never replayed.
        self._opaque = settings.opaque
        #: Lines of the report, None where nobody will ask for one.
        self.entries: list[Entry] | None = None
        #: See `configure`.
        self.replay_order: Any = settings.replay_order
        self.replay_window: int | None = settings.replay_window
        self._session: offload.Session | None = None
        self._cached: dict[int, list[weakref.ref[Value]]] = {}

    # Values

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor, None where it has none that can be read (Rule 4)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        return storage

    def new_value(self, nbytes: int, device: torch.device) -> Value:
        """Return a value with the next number."""
        self.num_values += 1
        return Value(nbytes, device, self.num_values)

    def value_of(self, tensor: Tensor) -> Value | None:
        """Return what the storage of `tensor` holds now; takes it as an input if nothing recorded made it."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        block = self.blocks.get(id(storage))
        if block is None or block.storage() is not storage:
            return self._take_input(tensor, storage)
        value = block.value
        base = tensor._base
        if base is None:
            base = tensor
        if value.version >= 0 and value.root is not None and value.root() is base:
            if tensor._version > value.version:
                return self._changed_unseen(tensor, block)
        else:
            self._look_at(value, tensor)
        return value

    @staticmethod
    def _look_at(value: Value, tensor: Tensor) -> None:
        """Remember the version of the bytes of `value`."""
        if not tensor.is_inference():
            base = tensor._base
            value.version = tensor._version
            value.root = weakref.ref(tensor if base is None else base)

    def _take_input(self, tensor: Tensor, storage: Any) -> Value:
        value = self.new_value(storage.nbytes(), storage.device)
        value.is_input = True
        value.why_opaque = "an input of the region"
        root = tensor
        if tensor._is_view() and tensor._base is not None and _is_on(tensor._base, storage):
            root = tensor._base
        if root.is_leaf and (root.requires_grad or isinstance(root, torch.nn.Parameter)):
            value.is_parameter = True
            value.hold_bytes = 0
        value.held = root
        self._look_at(value, root)
        value.action = Action.KEEP if self.choice.for_value is None else None
        self.blocks[id(storage)] = Block(storage, value)
        self.holding.append(value)
        return value

    def _changed_unseen(self, tensor: Tensor, block: Block) -> Value:
        """Something that was not recorded changed a storage: what it holds now is opaque."""
        old = block.value
        if old.step is None:
            self.num_lost += 1
        old.held = None
        value = self.new_value(old.nbytes, old.device)
        value.action = old.action
        value.why_opaque = "changed outside of the recorder"
        value.held = tensor
        self._look_at(value, tensor)
        self.holding.append(value)
        block.value = value
        return value

    def add_result(self, step: Step, tensor: Tensor, index: int, action: Action | None, why_opaque: str) -> None:
        """Note a tensor that a call returned; an alias of what is known already is nothing new (Rule 2)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = id(storage)
        known = self.blocks.get(key)
        if known is not None and known.storage() is storage:
            return
        self.num_values += 1
        value = Value(storage.nbytes(), storage.device, self.num_values)
        self.add_value(value, step, (0, index), tensor, action, why_opaque)
        self._look_at(value, tensor)
        self.blocks[key] = Block(storage, value)

    def add_value(
        self,
        value: Value,
        step: Step | None,
        place: tuple[int, int],
        tensor: Tensor,
        action: Action | None,
        why_opaque: str,
    ) -> None:
        """Note how a new value comes about and what the policy wants with it."""
        value.action = action
        why_opaque = why_opaque or self._why_never(value, step, tensor)
        value.why_opaque = why_opaque
        value.operator = None if step is None else step.operator
        if step is None or why_opaque or (action is not None and action is not Action.RECOMPUTE):
            value.held = tensor
            self.holding.append(value)
            return
        step.add_output(value, place)
        hold_bytes = 0
        for read in step.inputs:
            hold_bytes += read.hold_bytes
        if hold_bytes > value.nbytes:
            value.is_candidate = True
        else:
            value.hold_bytes = hold_bytes

    def _why_never(self, value: Value, step: Step | None, tensor: Tensor) -> str:
        """Return why a new value must not be replayed here, or an empty text. Advances the structure."""
        func = None if step is None else step.operator.func
        self.structure = value.key = key = hash((self.structure, func, tensor.shape, tensor.dtype))
        site = self.site
        if key not in site.modules:
            site.module(key)
        if site.opaque and key in site.opaque:
            return "it came back wrong before"
        if self._opaque and step is not None:
            names = [step.operator.name, site.modules.get(key) or ""]
            if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self._opaque):
                return "configure(opaque=...) names it"
        return ""

    def protect(self, value: Value | None) -> None:
        """Get ready for the storage of a value to be overwritten by a recorded operator (Rule 1)."""
        if value is None:
            return
        value.spare = None
        if value.held is None and value.stored is None:
            return
        if value.step is None and self._is_needed(value):
            self._copy(value)
            return
        if value.step is None:
            self.num_lost += 1
        value.held = value.stored = None

    def _copy(self, value: Value) -> None:
        counters.add("copied_on_write_bytes", value.nbytes)
        with Paused():
            base = value.held if value.held is not None else value.stored()
            copied = torch.empty(0, dtype=torch.uint8, device=value.device)
            copied.set_(base.detach().untyped_storage().clone())
            if value.stored is not None:
                self.offload(value, copied)
            else:
                value.held = copied
                self._look_at(value, copied)

    def _is_needed(self, value: Value) -> bool:
        """Whether a saved tensor is on `value`, or is replayed from it."""
        if any(handle() is not None for handle in value.handles):
            return True
        seen: set[int] = set()
        pending = [saved for saved in (reference() for reference in self.saved) if saved is not None]
        while pending:
            current = pending.pop()
            if id(current) in seen or current.ordinal < value.ordinal or current.held is not None:
                if current is value:
                    return True
                continue
            seen.add(id(current))
            if current is value:
                return True
            if current.step is not None:
                pending.extend(current.step.inputs)
        return False

    def offload(self, value: Value, tensor: Tensor) -> None:
        """Move the bytes of a value to the store."""
        with Paused():
            if self._session is None:
                self._session = offload.Session("auto", min_bytes=0)
            packed = self._session.pack(_whole(tensor))
        value.stored = packed.unpack
        value.held = None
        value.version = -1

    def parked(self, tensor: Tensor) -> Any:
        """Begin to move the original of a dropped tensor to a store that is in use; returns the way back, or None."""
        if stores.existing("host" if tensor.is_cuda else "disk") is None:
            return None
        if self._session is None:
            self._session = offload.Session("auto", min_bytes=0)
        packed = self._session.pack(tensor.detach().clone())
        return packed.unpack

    def clear_after(self, task: int, value: Value) -> None:
        """Let go of what is cached for `value` when the backward `task` ends, at the latest (Rule 12)."""
        values = self._cached.get(task)
        if values is None:
            values = self._cached[task] = []
            if torch_private.queue_callback is not None:
                torch_private.queue_callback(lambda: self._clear(task))
        values.append(weakref.ref(value))

    def drop_cached(self, *, after: Value) -> None:
        """Let go of replayed values that nobody asked for, and that only later values than `after` come from."""
        for values in self._cached.values():
            for value in filter(None, (reference() for reference in values)):
                if value.ordinal > after.ordinal and not any(handle() is not None for handle in value.handles):
                    value.cached = None

    def cached_bytes(self) -> int:
        """Return the bytes of replayed values that wait for their turn."""
        values = {value for values in self._cached.values() for value in (reference() for reference in values)}
        return sum(value.nbytes for value in values if value is not None and value.cached is not None)

    def _clear(self, task: int) -> None:
        with self.lock:
            for reference in self._cached.pop(task, ()):
                value = reference()
                if value is not None and value.cached_task == task:
                    value.cached = None

    def can_replay(self, value: Value) -> bool:
        """Whether a value can be made again, as things stand."""
        if value.step is None or value.why_opaque:
            return False
        return self.num_lost == 0 or is_obtainable(value)


class Paused:
    """Every recorder stands aside in this thread, and no graph is built (Rule 9)."""

    __slots__ = ("_grad", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._grad = torch.is_grad_enabled()
        paused[self._thread] = paused.get(self._thread, 0) + 1
        if self._grad:
            torch_private.set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._grad:
            torch_private.set_grad_enabled(True)
        left = paused[self._thread] - 1
        if left:
            paused[self._thread] = left
        else:
            del paused[self._thread]


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor; inference tensors have none and never change."""
    return 0 if tensor.is_inference() else tensor._version


def _is_on(tensor: Tensor, storage: Any) -> bool:
    try:
        return tensor.untyped_storage() is storage
    except (NotImplementedError, RuntimeError):
        return False


def _whole(tensor: Tensor) -> Tensor:
    """Return an alias of all elements of the storage of `tensor`, with its version counter."""
    alias = tensor.detach()
    if alias.is_conj() or alias.is_neg():
        return torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)
