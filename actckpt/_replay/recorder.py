"""The recorder: notes each operator of a region's forward once, as steps and values.

NOTE [ Replay ]

Each rule answers a way in which a simpler scheme gave silently wrong gradients.

Rule 1.  Versions. An operator in place makes a new value of a storage; written arguments include lists of tensors.
         A replayed one works on a private copy while an older value is still needed. Before a recorded operator
         overwrites bytes that only the storage holds (inputs, kept, opaque) and that a saved value needs, they are
         copied (`copied_on_write_bytes`). What is made in place from a kept value inherits its action.
Rule 2.  Identity. Aliases are recognised by the identity of their storage under a weak reference, not by schema
         (`_unsafe_view` returns one without saying so) and not by address (addresses are used again).
Rule 3.  Randomness. The states of the generators are captured before a random operator and used for its replay: in a
         private generator where the operator takes one, else swapped in under the lock of NOTE [ Random state ]. An
         operator that is not torch's own is random if it moved a default generator.
Rule 4.  Opaque values. Bytes that no recorded operator made are never replayed: outputs of raw kernels, memory that
         no recorded operator has written as a whole (buffers of `torch.empty` that are filled piece by piece), what
         compiled code returns, storages that cannot be read (sparse, nested) and what is made from them or from
         inference tensors, which have no version counter; what is made below dispatch modes that may change it
         (NOTE [ Modes ]).
Rule 5.  Effects. Collectives, operators that write to arguments behind their schema's back or have an effect that
         torch was told of, and operators that are nondeterministic (on CUDA; on the CPU, most with several threads) are
         not executed again, or only in a form without the effect. Collectives that a policy names are: see
        NOTE [ Repeated collectives ] in `collectives`.
Rule 6.  Audit. See `audit`.
Rule 7.  Outside changes. If replay needs bytes that changed after the region closed, unpack raises. The aliases that
         tell are made outside of the dispatch handler: inside, `detach()` does not share the version counter.
         State that the region itself wrote in place (buffers of `spectral_norm`, moving averages) changes again in
         its next call: dropped values are replayed from a copy, made when the region closes.
Rule 8.  Outside storages. Before replay reads a storage from outside, its size must be the recorded one.
Rule 9.  State. Replay runs without grad and autocast, with every recorder suspended (`paused`), each operator under the
         settings that it had in forward (NOTE [ Settings ]). A tensor that
         unpack returned while the region is open is known to the region as what it is.
Rule 10. Compile. Operators inside of compiled code are not recorded: kernels that no dispatcher sees write to the same
         memory in between. What it returns and saves is opaque. A function of which that is much runs again, from its
         next call on. Higher-order operators are let through. Before torch 2.10 it runs uncompiled in a region, and is
         recorded: so it does below any dispatch mode there, those of torch's selective checkpoint included.
Rule 11. Nesting. A region inside another one, with no other hooks in between, records for it, with its own policy.
         Else what it must hold goes through the hooks outside when it closes, in the order of birth: see `outside`.
Rule 12. Caching. Replayed values that this backward asks for again stay until it has, or ends: NOTE [ Needs ] in
         `lineage`, and within a window of bytes: NOTE [ Windows ] in `windows`.
Rule 13. Order. See `schedule`.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from actckpt import _C
from actckpt._C import add_results, add_value, with_windows
from actckpt._core import devices, random_state
from actckpt._core.observing_mode import ObservingMode
from actckpt._replay import collectives, saved_tensor_hooks
from actckpt._replay.geometry import covers_all
from actckpt._replay.lineage import Step, Value, Window, blank_of, is_unread, redirect
from actckpt._replay.named_operators import Matches
from actckpt._replay.operators import Operator
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["Recorder", "WatchingRecorder", "record_special"]

#: Of what stands for bytes that a step does not read.
_OVERWRITTEN = "overwritten"
#: Why what an empty factory returned is opaque, until one operator has written all of it.
_UNINITIALISED = "uninitialised memory"


class Recorder(ObservingMode):
    """The dispatch mode of one tape at a time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: Tape | None = None


class WatchingRecorder(Recorder):
    """A recorder that notes which operators of a policy run. See NOTE [ Operators that a policy names ]."""

    def __init__(self, matches: Matches) -> None:
        super().__init__()
        self.matches = matches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matches.note(func)
        return _C.torch_dispatch(self, func, types, args, kwargs)


# Torch wraps the handlers of a class body so that the compiler does not look into them; this one is native.
setattr(Recorder, "__torch_dispatch__", _C.torch_dispatch)  # noqa: B010 - mypy takes it for a method


def record_special(
    tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None, action: Action | None
) -> Any:
    """Record an operator that writes, draws, allocates or communicates; `action`: None where results have their own."""
    choice, kwargs = tape.choice, kwargs or {}
    inputs: list[Value] = []
    num_unversioned_args = tape.num_unversioned_args
    arguments = [with_windows(tape, arg, inputs) for arg in args]
    keywords = {k: with_windows(tape, v, inputs) for k, v in kwargs.items()}
    step = Step(operator, arguments, keywords, inputs)
    written = _written_tensors(operator, args, kwargs)
    hidden = _hidden_tensors(operator, args, bool(written))
    why_unversioned = tape.why_unversioned if tape.num_unversioned_args != num_unversioned_args else ""
    why_opaque = _why_never(tape, operator, args, bool(hidden)) or why_unversioned or tape.why_opaque or ""
    if hidden and operator.has_form_without_effect:
        step.args = operator.without_effect(arguments)
        step.inputs = _values_in(step.args)
    generators = _begin_random(tape, step, args, kwargs)
    early = _saved_too_early(tape, operator, args)
    old = [_begin_write(tape, step, tensor) for tensor in written]
    for tensor in hidden:
        _begin_write(tape, None, tensor)

    result = _called(tape, operator, args, kwargs, [*written, *hidden])

    if operator.forgets_versions:
        increment_version([tensor for tensor in written if not tensor.is_inference()])
    if generators is not None and not _has_moved(generators):
        step.random = None
    if choice.asks_calls:
        action = choice.after_call(operator.func, args, kwargs, result)
    for tensor, value in zip(written, old, strict=True):
        _end_write(tape, step, tensor, value, action, why_opaque)
    for tensor in hidden:
        _end_write(tape, None, tensor, None, None, "written by an operator with effects")
    if early is not None:
        saved_tensor_hooks.point_at(tape, early, args[operator.saved_before_written])
    add_results(tape, step, result, action, why_opaque)
    if operator.is_repeatable:
        collectives.note(tape, operator, result)
    return result


def _called(
    tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], overwritten: list[Tensor]
) -> Any:
    """Run an operator; where it fails, some of what it was to overwrite may be."""
    try:
        return operator.func(*args, **kwargs)
    except BaseException:
        for tensor in overwritten:
            _end_write(tape, None, tensor, None, None, "an operator that writes to it failed")
        raise


def _values_in(args: Any) -> list[Value]:
    found = []
    for arg in args:
        if isinstance(arg, Window):
            found.append(arg.value)
        elif isinstance(arg, list):
            found.extend(_values_in(arg))
    return found


def _tensors_in(args: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(_tensors_in(arg))
    return found


def _written_tensors(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call says it writes to."""
    places = [args[position] for position in operator.written if position < len(args)]
    return _tensors_in([*places, *(kwargs.get(name) for name in operator.written_names)])


def _hidden_tensors(operator: Operator, args: tuple[Any, ...], has_written: bool) -> list[Tensor]:
    """Return the tensors that a call writes to without saying so (Rule 5)."""
    if operator.is_collective and not has_written:
        return [] if operator.name.startswith("_c10d_functional") else _tensors_in(args)
    return [args[position] for position in operator.writes_hidden(args)]


def _why_never(tape: Tape, operator: Operator, args: tuple[Any, ...], has_hidden_writes: bool) -> str:
    """Return why what a call makes must not be replayed, whatever the policy says, or an empty text."""
    if operator.is_repeatable and collectives.is_named(tape, operator):
        return ""
    return _why_opaque(operator, args, has_hidden_writes)


def _why_opaque(operator: Operator, args: tuple[Any, ...], has_hidden_writes: bool) -> str:
    """Return why what a call makes must not be replayed, or an empty text."""
    if operator.is_uninitialised:
        return _UNINITIALISED
    if operator.is_collective:
        return "a collective"
    if operator.reshapes_storage:
        return "its storage was replaced or resized"
    if operator.has_effects or (has_hidden_writes and not operator.has_form_without_effect):
        return "an operator with effects"
    if operator.reads_outside:
        return "read from outside of the program"
    if operator.is_nondeterministic_on_cuda and _is_nondeterministic_on_accelerator(operator, args):
        return "nondeterministic on accelerators"
    if operator.nondeterministic_threads and _is_nondeterministic_on_cpu(operator, args):
        return "nondeterministic on the CPU"
    if operator.is_random and devices.is_capturing():
        return "random numbers in a stream capture"
    return ""


def _is_nondeterministic_on_accelerator(operator: Operator, args: tuple[Any, ...]) -> bool:
    flag = operator.nondeterministic_flag
    return (
        (flag is None or bool(args[flag]))
        and not torch.are_deterministic_algorithms_enabled()
        and any(map(devices.is_on_accelerator, _tensors_in(args)))
    )


def _is_nondeterministic_on_cpu(operator: Operator, args: tuple[Any, ...]) -> bool:
    has_threads = torch.get_num_threads() >= operator.nondeterministic_threads
    return has_threads and any(tensor.is_cpu for tensor in _tensors_in(args))


def _begin_random(tape: Tape, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Capture the generators that a call may draw from (Rule 3); returns them if it is not known that it does."""
    operator = step.operator
    if not (operator.is_random or operator.is_foreign) or devices.is_capturing():
        return None
    found = [tensor.device for tensor in _tensors_in(args)]
    if kwargs.get("device") is not None:
        found.append(torch.device(kwargs["device"]))
    explicit = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)]
    if explicit:
        step.random = explicit[0].device, explicit[0].get_state()
        return None
    found = [device for device in found if device.type not in ("cpu", "meta")]
    generators = random_state.generators_of_devices(found)
    own = generators[-1]
    if operator.generator_name is not None and isinstance(own, torch.Generator):
        step.random = own.device, own.get_state()
        return None
    if operator.is_foreign:  # may send what it was given to another device
        generators = random_state.generators_of_region(found)
    step.random = random_state.capture(generators)
    tape.swap = _C.current_swap()
    return (generators, [generator.get_state() for generator in generators]) if not operator.is_random else None


def _has_moved(generators: Any) -> bool:
    return any(not torch.equal(generator.get_state(), state) for generator, state in zip(*generators, strict=True))


def _saved_too_early(tape: Tape, operator: Operator, args: tuple[Any, ...]) -> Any:
    """Take from its value the handle under which autograd saved, for this call, what the call will write to."""
    position = operator.saved_before_written
    if position < 0 or args[position] is None or not torch.is_grad_enabled():
        return None
    if not any(tensor.requires_grad for tensor in _tensors_in(args)):
        return None
    value = tape.value_of(args[position])
    return value.take_last_handle() if value is not None else None


def _begin_write(tape: Tape, step: Step | None, tensor: Tensor) -> Value | None:
    """Prepare for an overwrite: save what it destroys where that is needed (Rule 1)."""
    value = tape.value_of(tensor)
    if value is None:
        return None
    if step is not None and value not in step.written:
        is_whole = covers_all(tensor, value.nbytes)
        is_read = not step.operator.overwrites or not (is_whole or value.why_opaque == _UNINITIALISED)
        if not is_read and step.inputs.count(value) == 1:
            old, value = value, blank_of(value, _OVERWRITTEN if is_whole else _UNINITIALISED)
            redirect(step, old, value)
        step.add_written(value)
    tape.protect(tape.value_of(tensor))
    return value


def _end_write(
    tape: Tape, step: Step | None, tensor: Tensor, old: Value | None, action: Action | None, why_opaque: str
) -> None:
    """Give the storage of a tensor that was written to its new value."""
    storage = _C.strided_storage_of(tensor)
    if storage is None:
        return
    nbytes = storage.nbytes()
    known = tape.storages.get(id(storage))
    if known is None or known.storage() is not storage:
        unknown = tape.value_of(tensor)  # `set_` gave it a storage that we do not know: an input of the region
        assert unknown is not None
        unknown.version = -1  # counted up after this handler returns
        return
    if step is not None and step.operator.reshapes_storage and known.value is not old:
        return  # `set_` gave it one that we know, in which it wrote nothing
    if known.value.step is step and step is not None:
        return  # two written arguments on one storage
    value = tape.new_value(nbytes, tensor.device)
    if old is not None and old.action not in (None, Action.RECOMPUTE):
        action = old.action
    was_resized = old is not None and old.why_opaque is _OVERWRITTEN and not covers_all(tensor, nbytes)
    if was_resized or nbytes != known.value.nbytes:
        why_opaque = why_opaque or "its storage was replaced or resized"
    elif old is not None and old.why_opaque == _UNINITIALISED:
        why_opaque = why_opaque or _UNINITIALISED
    place = step.written.index(old) if step is not None and old is not None else 0
    operator = None if step is None else step.operator
    add_value(tape, value, step, operator, place, tensor, action, why_opaque)
    value.version = -1  # counted up after this handler returns
    if is_unread(known.value):
        known.value.held = None
    _note_written_state(tape, known.value, value, tensor)
    known.value = value


def _note_written_state(tape: Tape, old: Value, new: Value, tensor: Tensor) -> None:
    """Note what an operator wrote in place to state from outside (Rule 7)."""
    is_first = old.is_input and not old.is_parameter and not tensor.requires_grad
    if not is_first and (tape.written_state is None or old not in tape.written_state):
        return
    if tape.written_state is None:
        tape.written_state = weakref.WeakSet()
    tape.written_state.add(new)
