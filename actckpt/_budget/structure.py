"""The values that blocks make, the operators behind them, and the recompute time of each.

A forward of each block runs in a region. So the recorder names values by the places that a plan's tables use later, and
says which values it could replay. Around it runs a mode that times each operator and records which storages it reads
and
makes: a graph of places.

- A value is a storage that an operator of the block made. An in-place operator on it adds to its recompute time. If
  another value was made from it before the write, it counts as not replayable.
- A dropped value that is alive is held by the recorder, or elsewhere (an attribute, a context of an
  `autograd.Function`). The recorder holds what replays start from (results of opaque operators) and what routes data
  (`routing`). Such a value is not replayable, nor are values made from it that backward does not need. A run without
  recording shows what is held elsewhere. Dropping that frees nothing, and a rerun does not either. So its bytes are
  added to those of the block's input, which always stay, and keeping the value costs nothing more. (This covers values
  that backward needs: the recorder does not know others as held, and keeping them would cost their bytes.) Casts of
  parameters in autocast's cache are alive until the program leaves autocast, whatever is kept. They have no bytes; the
  meter counts them.
- Storages from outside the block cost nothing to read. Parameters and buffers exist anyway. The block's input, and
  tensors that several blocks share (masks, angles), are held by whoever made them or by the region. The input is the
  first tensor that gradients flow through; the others stay, and count once, where they were made.

A sufficiently large value may be offloaded if there is a store (`bandwidth`), unless only replays read it. An input may
be offloaded only if another block made it and no other block gets it; otherwise that frees nothing (`settled_block`).
If a plain forward on a copy of the input leaves nothing that holds the input, backward needs the input only to
recompute others; the values made from it are marked.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt import config
from actckpt._blocks.arguments import first_tensor
from actckpt._budget.fake_collectives import Exchanges
from actckpt._C import Calls, is_paused, look_up_call
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import devices, torch_private
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import storages_of, tensors_in
from actckpt._offload import session
from actckpt._options import CheckpointOptions
from actckpt._replay.calls import RegionOptions
from actckpt._replay.operators import operator_of
from actckpt._rerun.buffers import written_tensors
from actckpt._text.places import Place, Selector
from actckpt.action import Action, SavedTensorInfo
from actckpt.planner.costs import BLOCK_INPUT, Value

__all__ = [
    "BlockStructure",
    "held_elsewhere",
    "is_cast_of_parameter",
    "operator_seconds",
    "run_recorded",
]


@dataclasses.dataclass
class _Made:
    """A storage that the block made."""

    #: One for each operator that wrote to it; the last one counts, or the one at which autograd saved it.
    places: list[Place]
    order: int
    nbytes: int
    seconds: float
    inputs: list[_Made]
    storage: weakref.ref[torch.UntypedStorage]
    replayable: bool = True
    #: An operator that made it read the block's input.
    reads_input: bool = False
    #: Another value was made from it.
    is_read: bool = False
    #: It was dropped, and is alive.
    is_alive: bool = False
    #: Something other than the recorder holds it.
    is_held: bool = False
    #: It is a copy of a trained parameter in another dtype ...
    is_cast_of_parameter: bool = False
    #: ... in autocast's cache.
    is_cached: bool = False


class BlockStructure:
    """The values of one block call, in the order of their creation."""

    def __init__(self, argument: Tensor | None, *, offloads: bool) -> None:
        storage = None if argument is None else argument.untyped_storage()
        self.input_bytes = 0 if storage is None else storage.nbytes()
        self.input = None if storage is None else weakref.ref(storage)
        self.device = torch.device("cpu") if argument is None else argument.device
        #: Whether there is a store for its saved tensors.
        self.offloads = offloads
        #: Its communication with other ranks.
        self.exchanges = Exchanges()
        self._saved: dict[Place, SavedTensorInfo] = {}
        self._made: list[_Made] = []
        #: External storages that operators of the block wrote to, by id.
        self.written: dict[int, torch.UntypedStorage] = {}
        #: Whether only its next call shows its costs: compiled code runs for the first time, or its results were kept
        #: now.
        self.is_measured_later = False
        #: Generators passed to its operators, by id.
        self.generators: dict[int, torch.Generator] = {}

    def note_compiled(self) -> None:
        """Results of compiled code were kept. From the next call on, the block is rerun."""
        self.is_measured_later = True

    def note_saved(self, info: SavedTensorInfo) -> Action:
        """Record what autograd saves; as a policy, recompute everything."""
        if info.place is not None and not info.is_parameter:
            self._saved[info.place] = info
        return Action.RECOMPUTE

    def has_opaque(self) -> bool:
        """Return whether `configure(opaque=...)` names a value, which a rerun would make anew."""
        selectors = [Selector.parse(name) for name in config.settings().opaque]
        places = {(place.module, place.operator) for made in self._made for place in made.places} if selectors else ()
        return any(selector.covers(*place) for selector in selectors for place in places)

    def saved_bytes(self) -> int:
        """Return the bytes of the values that backward needs, and that would be released otherwise."""
        return sum(made.nbytes for made in self._made if self._info(made) is not None and not made.is_held)

    def _info(self, made: _Made) -> SavedTensorInfo | None:
        return next((self._saved[place] for place in made.places if place in self._saved), None)

    def _name(self, made: _Made) -> str:
        return str(next((place for place in made.places if place in self._saved), made.places[-1]))

    def returned(self, result: Any) -> dict[str, weakref.ref[torch.UntypedStorage]]:
        """Return the storages of returned values that backward needs, by name."""
        storages = {id(storage) for storage in storages_of(list(tensors_in(result)))}
        needed = [made for made in self._made if self._info(made) is not None]
        return {self._name(made): made.storage for made in needed if id(made.storage()) in storages}

    def storages(self) -> dict[str, weakref.ref[torch.UntypedStorage]]:
        return {self._name(made): made.storage for made in self._made}

    def note_made(self, made: _Made) -> None:
        self._made.append(made)

    def note_cast(self) -> None:
        """The operator that made the last storage casts a parameter."""
        self._made[-1].is_cast_of_parameter = True

    def saved_cast_bytes(self) -> int:
        """Return the bytes of the parameter casts that the block made and backward needs."""
        return sum(made.nbytes for made in self._made if made.is_cast_of_parameter and self._info(made) is not None)

    def bytes_held(self) -> int:
        """Return the bytes that are alive whether they are kept or not."""
        return sum(made.nbytes for made in self._made if made.is_held)

    def casts(self) -> list[tuple[weakref.ref[torch.UntypedStorage], int, str]]:
        """Return the parameter casts in autocast's cache: storages, their bytes and names."""
        return [(made.storage, made.nbytes, self._name(made)) for made in self._made if made.is_cached]

    def holds_twice_in_rerun(self) -> bool:
        """Return whether a rerun duplicates live values."""
        return any(made.is_held for made in self._made)

    def note_alive(self, result: Any) -> frozenset[Place]:
        """Record which dropped values are alive after the block returned `result`.

        Returns:
            Their places, without those known to be held by autocast's cache.
        """
        returned = {id(storage) for storage in storages_of(list(tensors_in(result)))}
        caches = torch_private.any_autocast_enabled() and torch.is_autocast_cache_enabled()
        for made in self._made:
            storage, info = made.storage(), self._info(made)
            is_dropped = made.replayable and (info is None or info.replayable)
            made.is_alive = is_dropped and storage is not None and id(storage) not in returned
            made.is_cached = made.is_alive and made.is_cast_of_parameter and caches
        return frozenset(made.places[0] for made in self._made if made.is_alive and not made.is_cached)

    def note_held(self, places: frozenset[Place]) -> None:
        """Record which live values are held by something other than the recorder."""
        for made in self._made:
            made.is_held = made.is_alive and made.places[0] in places
            if made.is_alive and not made.is_held and not made.is_cached:
                made.replayable = False

    def values(self) -> tuple[Value, ...]:
        """Return the values for the planner: the block's input, what backward needs, and what it is made from."""
        wanted = self._leading_to_saved()
        always = self.bytes_held()
        offloadable = not always and self._may_move(self.input_bytes)
        values = [Value(BLOCK_INPUT, self.input_bytes + always, offloadable=offloadable, replayable=False)]
        lost: set[str] = set()  # neither kept nor recomputable
        for made in sorted(self._made, key=lambda made: made.order):
            if id(made) in wanted:
                info = self._info(made)
                replayable = made.replayable and (info is None or info.replayable)
                inputs = tuple(dict.fromkeys(self._name(source) for source in made.inputs if id(source) in wanted))
                inputs = (BLOCK_INPUT, *inputs) if made.reads_input else inputs
                name = self._name(made)
                replayable = replayable and lost.isdisjoint(inputs)
                if info is None and not replayable:
                    lost.add(name)
                nbytes = 0 if made.is_cached or (made.is_held and info is not None) else made.nbytes
                may_move = info is not None and self._may_move(nbytes)
                values.append(Value(name, nbytes, made.seconds, inputs, info is not None, may_move, replayable))
        return tuple(values)

    def seconds(self) -> dict[str, float]:
        """Return the time of making each value, by all of its places."""
        return {str(place): made.seconds for made in self._made for place in made.places}

    def _may_move(self, nbytes: int) -> bool:
        return self.offloads and nbytes >= session.DEFAULT_MIN_BYTES

    def _leading_to_saved(self) -> set[int]:
        wanted: set[int] = set()
        left = [made for made in self._made if self._info(made) is not None]
        while left:
            made = left.pop()
            if id(made) not in wanted:
                wanted.add(id(made))
                left.extend(made.inputs)
        return wanted


def is_cast_of_parameter(func: Any, args: Any) -> bool:
    """Return whether an operator casts a trained parameter to another dtype, which autocast caches."""
    if func is not torch.ops.aten._to_copy.default or not isinstance(args[0], torch.nn.Parameter):
        return False
    return args[0].requires_grad and args[0].is_leaf


def run_recorded(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argument: Tensor | None,
    *,
    offloads: bool,
) -> tuple[Any, BlockStructure]:
    """Run the forward of a block once; return its result, and what it made.

    It runs as under `apply`, so that what is audited here is not audited again when a plan runs.

    Args:
        argument: its input.
        offloads: whether there is a store for its saved tensors.
    """
    structure = BlockStructure(argument, offloads=offloads)
    options = CheckpointOptions(policy=structure.note_saved)
    # Calls at other sizes may have started with the same operators.
    inside = RegionOptions(counts_anew=True, looks_up_calls=True, note_compiled=structure.note_compiled)
    with structure.exchanges, _Graph(structure):
        result = checkpoint_call(forward, args, kwargs, options, inside=inside)
    structure.exchanges.close()
    return result, structure


def held_elsewhere(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[Place]:
    """Run the forward of a block once without recording; return the places of values that stay alive."""
    result, structure = _run_unrecorded(forward, args, kwargs, None)
    return structure.note_alive(result)


def operator_seconds(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Run the forward of a block once without recording; return the time of making each value, by place."""
    _, structure = _run_unrecorded(forward, args, kwargs, first_tensor((args, kwargs)))
    return structure.seconds()


def _run_unrecorded(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argument: Tensor | None
) -> tuple[Any, BlockStructure]:
    structure = BlockStructure(argument, offloads=False)
    with _Graph(structure):
        return checkpoint_call(forward, args, kwargs, CheckpointOptions(policy="recompute")), structure


class _Graph(ObservingMode):
    """Records which operators make and read which storages, and times them. Places are those of the recorder."""

    def __init__(self, structure: BlockStructure) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._structure = structure
        self._by_storage: dict[int, _Made] = {}
        self._calls = Calls()
        self._num_made = 0

    def __enter__(self) -> Any:
        self._calls.begin("")
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.end()  # it holds frames

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_paused():  # the recorder's own operators: checksums
            return func(*args, **(kwargs or {}))
        before = {id(storage): storage for storage in storages_of((args, kwargs or {}))}
        arguments = (*args, *(kwargs or {}).values())
        self._structure.generators.update((id(item), item) for item in arguments if isinstance(item, torch.Generator))
        written = storages_of(written_tensors(func, args, kwargs or {})) if func._schema.is_mutable else ()
        self._structure.written.update((id(item), item) for item in written if self._known(item) is None)
        place = self._place(func)
        start = devices.moment(self._structure.device)
        result = func(*args, **(kwargs or {}))
        seconds = devices.seconds_between(start, devices.moment(self._structure.device))
        read = [known for storage in before.values() if (known := self._known(storage)) is not None]
        reads_input = self._structure.input is not None and id(self._structure.input()) in before
        results = result if isinstance(result, (tuple, list)) else (result,)
        new = {index: storage for index, item in enumerate(results) for storage in storages_of(item)}
        new = {index: storage for index, storage in new.items() if id(storage) not in before}
        if place is None:
            return result
        if new:
            self._note_made(place, new, seconds, read, reads_input)
            if is_cast_of_parameter(func, args):
                self._structure.note_cast()
        elif func._schema.is_mutable:
            self._note_written(place, args, seconds, read, reads_input)
        return result

    def _known(self, storage: torch.UntypedStorage) -> _Made | None:
        made = self._by_storage.get(id(storage))
        return made if made is not None and made.storage() is storage else None

    def _place(self, func: Any) -> Place | None:
        """Return the place of the first result of the current operator; None: it makes views."""
        operator = operator_of(func)
        if getattr(operator, "is_view", False):  # the recorder does not count calls that only make views
            return None
        module, call, occurrence = look_up_call(self._calls, operator)
        return Place(module, operator.name, occurrence, call=call)

    def _note_made(
        self,
        place: Place,
        new: dict[int, torch.UntypedStorage],
        seconds: float,
        read: list[_Made],
        reads_input: bool,
    ) -> None:
        for result, storage in new.items():
            reference = weakref.ref(storage)
            places = [dataclasses.replace(place, result=result)]
            made = _Made(
                places,
                self._num_made,
                storage.nbytes(),
                seconds,
                list(read),
                reference,
                reads_input=reads_input,
            )
            for source in read:
                source.is_read = True
            self._num_made += 1
            self._by_storage[id(storage)] = made
            self._structure.note_made(made)

    def _note_written(
        self, place: Place, args: tuple[Any, ...], seconds: float, read: list[_Made], reads_input: bool
    ) -> None:
        """Record an in-place operator: its first argument is what it writes to."""
        written = next(
            (known for storage in storages_of(args[:1]) if (known := self._known(storage)) is not None), None
        )
        if written is None:
            return
        written.places.append(place)
        written.seconds += seconds
        if written.is_read:
            written.replayable = False
            return
        written.reads_input = written.reads_input or reads_input
        for other in read:
            if other is not written:
                written.inputs.append(other)
                other.is_read = True
        written.order = self._num_made
        self._num_made += 1
