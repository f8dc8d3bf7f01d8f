"""What the blocks of a model make: values, the operators that lead to them, and what each takes to compute again.

NOTE [ Structure of a block ]

Rule 1. A forward of each block runs in a region, so that the recorder names values by the places that the tables of a
        plan have later, and says which of them it could replay. Around it runs a mode that times each operator and
        notes which storages it reads and makes: a graph of places.
Rule 2. A value is a storage that an operator of the block made. An operator that writes to it in place is part of what
        computing it again takes; where another value was made from it before, it is taken not to be replayable.
Rule 3. A value that was dropped and lives on is held by the recorder, which begins replays with it (results of opaque
        operators) or keeps what decides where data goes (NOTE [ Routing ]): then it is not replayable, nor is what was
        made from it where backward does not need it itself. Or it is held by something else: an attribute, a context of
        an `autograd.Function`. That shows where the block is run once more with nothing recorded. Dropping it frees
        nothing, nor does a rerun of the block: its bytes are added to those of the block's input, which always
        stay, and to keep it as well costs nothing. (What backward does not need is not known to the recorder as held:
        keeping it would cost its bytes.) Casts of parameters that autocast caches live until the program leaves that,
        whatever is kept: they have no bytes, and the meter counts them.
Rule 4. What has enough bytes may be offloaded where there is a store (NOTE [ Measuring links ]), unless only replays
        read it. Of inputs only those may that no other block is given and another block made: to move others frees
        nothing (`settled_block`).
Rule 5. Storages from outside of the block are read for nothing: parameters and buffers are there anyway; the block's
        input, and what several blocks share (masks, angles), are held by whoever made them or by the region. The input
        is the first tensor that gradients flow through; the others stay, and count once, where they were made.
Rule 6. Where a forward as it is, run on a copy of the input, leaves nothing that holds it, backward needs the input for
        no more than to compute others again: those that were made from it say so.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
from actckpt._text.places import Place
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
    #: It was dropped, and lives (Rule 3).
    is_alive: bool = False
    #: Something other than the recorder holds it.
    is_held: bool = False
    #: It is a copy of a trained parameter in another dtype.
    is_cast_of_parameter: bool = False
    #: And the cache of autocast holds it.
    is_cached: bool = False


class BlockStructure:
    """The values of one call of a block, in the order in which it makes them."""

    def __init__(self, argument: Tensor | None, *, offloads: bool) -> None:
        storage = None if argument is None else argument.untyped_storage()
        self.input_bytes = 0 if storage is None else storage.nbytes()
        self.input = None if storage is None else weakref.ref(storage)
        self.device = torch.device("cpu") if argument is None else argument.device
        #: Whether there is a store for what it saves.
        self.offloads = offloads
        #: What it exchanged with other ranks.
        self.exchanges = Exchanges()
        self._saved: dict[Place, SavedTensorInfo] = {}
        self._made: list[_Made] = []
        #: Storages from outside that operators of the block wrote to, by id.
        self.written: dict[int, torch.UntypedStorage] = {}
        #: Whether only its next call shows what it costs: compiled code runs for the first time, or was kept this time.
        self.is_measured_later = False
        #: Generators that its operators were given, by id.
        self.generators: dict[int, torch.Generator] = {}

    def note_compiled(self) -> None:
        """What compiled code made was kept. From the next call on the block runs again."""
        self.is_measured_later = True

    def note_saved(self, info: SavedTensorInfo) -> Action:
        """Take down what autograd saves; a policy that recomputes everything."""
        if info.place is not None and not info.is_parameter:
            self._saved[info.place] = info
        return Action.RECOMPUTE

    def saved_bytes(self) -> int:
        """Return the bytes of the values that backward needs, and that would be released if it did not."""
        return sum(made.nbytes for made in self._made if self._info(made) is not None and not made.is_held)

    def _info(self, made: _Made) -> SavedTensorInfo | None:
        return next((self._saved[place] for place in made.places if place in self._saved), None)

    def _name(self, made: _Made) -> str:
        return str(next((place for place in made.places if place in self._saved), made.places[-1]))

    def returned(self, result: Any) -> dict[str, weakref.ref[torch.UntypedStorage]]:
        """Return the storages of what backward needs and the block returned, by the names of these values."""
        storages = {id(storage) for storage in storages_of(list(tensors_in(result)))}
        needed = [made for made in self._made if self._info(made) is not None]
        return {self._name(made): made.storage for made in needed if id(made.storage()) in storages}

    def storages(self) -> dict[str, weakref.ref[torch.UntypedStorage]]:
        """Return the storages of values, by their names."""
        return {self._name(made): made.storage for made in self._made}

    def note_made(self, made: _Made) -> None:
        """Take down a storage that an operator made."""
        self._made.append(made)

    def note_cast(self) -> None:
        """The operator that made the last storage casts a parameter."""
        self._made[-1].is_cast_of_parameter = True

    def saved_cast_bytes(self) -> int:
        """Return the bytes of the casts of parameters that the block made and backward needs."""
        return sum(made.nbytes for made in self._made if made.is_cast_of_parameter and self._info(made) is not None)

    def bytes_held(self) -> int:
        """Return the bytes of what lives whether it is kept or not."""
        return sum(nbytes for _, nbytes, _ in self.held())

    def held(self) -> list[tuple[weakref.ref[torch.UntypedStorage], int, str | None]]:
        """Return what lives whether it is kept or not: storages, their bytes, and names of what backward needs."""
        return [
            (made.storage, made.nbytes, self._name(made) if self._info(made) is not None else None)
            for made in self._made
            if made.is_held
        ]

    def casts(self) -> list[tuple[weakref.ref[torch.UntypedStorage], int, str]]:
        """Return the casts of parameters in the cache of autocast: storages, their bytes and names."""
        return [(made.storage, made.nbytes, self._name(made)) for made in self._made if made.is_cached]

    def holds_twice_in_rerun(self) -> bool:
        """Return whether a rerun makes again what lives already."""
        return any(made.is_held for made in self._made)

    def note_alive(self, result: Any) -> frozenset[Place]:
        """Take down which of the values that were dropped are alive, the block having returned `result`.

        Returns:
            Their places, without those of which it is known what holds them: the cache of autocast.
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
        """Take down which of the values that are alive something other than the recorder holds."""
        for made in self._made:
            made.is_held = made.is_alive and made.places[0] in places
            if made.is_alive and not made.is_held and not made.is_cached:
                made.replayable = False

    def values(self) -> tuple[Value, ...]:
        """Return what the planner is told about: the block's input, what backward needs, and what leads to it."""
        wanted = self._leading_to_saved()
        always = self.bytes_held()
        offloadable = not always and self._may_move(self.input_bytes)
        found = [Value(BLOCK_INPUT, self.input_bytes + always, offloadable=offloadable, replayable=False)]
        lost: set[str] = set()  # nothing keeps them, and nothing computes them again
        for made in sorted(self._made, key=lambda made: made.order):
            if id(made) in wanted:
                info = self._info(made)
                replayable = made.replayable and (info is None or info.replayable)
                inputs = tuple(dict.fromkeys(self._name(each) for each in made.inputs if id(each) in wanted))
                inputs = (BLOCK_INPUT, *inputs) if made.reads_input else inputs
                name = self._name(made)
                replayable = replayable and lost.isdisjoint(inputs)
                if info is None and not replayable:
                    lost.add(name)
                nbytes = 0 if made.is_cached or (made.is_held and info is not None) else made.nbytes
                may_move = info is not None and self._may_move(nbytes)
                found.append(Value(name, nbytes, made.seconds, inputs, info is not None, may_move, replayable))
        return tuple(found)

    def seconds(self) -> dict[str, float]:
        """Return what each value took to make, by all of its places."""
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
    """Return whether an operator copies a parameter that is trained to another dtype, which autocast caches."""
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

    It runs as `apply` lets it run, so that what is audited here is not audited again when a plan runs.

    Args:
        argument: its input.
        offloads: whether there is a store for what it saves.
    """
    structure = BlockStructure(argument, offloads=offloads)
    options = CheckpointOptions(policy=structure.note_saved)
    # Other sizes may have begun with the same operators.
    inside = RegionOptions(counts_anew=True, looks_up_calls=True, note_compiled=structure.note_compiled)
    with structure.exchanges, _Graph(structure):
        result = checkpoint_call(forward, args, kwargs, options, inside=inside)
    structure.exchanges.close()
    return result, structure


def held_elsewhere(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[Place]:
    """Run the forward of a block once with nothing recorded; return the places of what it leaves alive."""
    result, structure = _run_unrecorded(forward, args, kwargs, None)
    return structure.note_alive(result)


def operator_seconds(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Run the forward of a block once with nothing recorded; return what the value of each place took to make."""
    _, structure = _run_unrecorded(forward, args, kwargs, first_tensor((args, kwargs)))
    return structure.seconds()


def _run_unrecorded(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argument: Tensor | None
) -> tuple[Any, BlockStructure]:
    structure = BlockStructure(argument, offloads=False)
    with _Graph(structure):
        return checkpoint_call(forward, args, kwargs, CheckpointOptions(policy="recompute")), structure


class _Graph(ObservingMode):
    """Notes which operators make and read which storages, and times them. Places are those that the recorder gives."""

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
        if is_paused():  # the recorder's own: checksums
            return func(*args, **(kwargs or {}))
        before = {id(storage): storage for storage in storages_of((args, kwargs or {}))}
        given = (*args, *(kwargs or {}).values())
        self._structure.generators.update((id(each), each) for each in given if isinstance(each, torch.Generator))
        written = storages_of(written_tensors(func, args, kwargs or {})) if func._schema.is_mutable else ()
        self._structure.written.update((id(each), each) for each in written if self._known(each) is None)
        place = self._place(func)
        start = devices.moment(self._structure.device)
        result = func(*args, **(kwargs or {}))
        seconds = devices.seconds_between(start, devices.moment(self._structure.device))
        read = [found for storage in before.values() if (found := self._known(storage)) is not None]
        reads_input = self._structure.input is not None and id(self._structure.input()) in before
        results = result if isinstance(result, (tuple, list)) else (result,)
        new = {index: storage for index, each in enumerate(results) for storage in storages_of(each)}
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
        """Return the place of the first result of an operator that runs; None: it makes views."""
        operator = operator_of(func)
        if getattr(operator, "is_view", False):  # the recorder counts no calls that run nothing else
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
            for each in read:
                each.is_read = True
            self._num_made += 1
            self._by_storage[id(storage)] = made
            self._structure.note_made(made)

    def _note_written(
        self, place: Place, args: tuple[Any, ...], seconds: float, read: list[_Made], reads_input: bool
    ) -> None:
        """An operator in place: its first argument is what it writes to (Rule 2)."""
        written = next(
            (found for storage in storages_of(args[:1]) if (found := self._known(storage)) is not None), None
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
