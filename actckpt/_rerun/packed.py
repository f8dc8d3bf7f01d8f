"""Inputs of a region inside other saved-tensor hooks: held packed, and unpacked for each rerun.

NOTE [ Packed inputs ]

Rule 1. Tensors among args and kwargs, and in tuples there, go through the hooks outside, each once. What was one object
is one object in a rerun. All other inputs are watched as without hooks, and stay alive: what other containers, closures
and objects hold, whether it is also an argument or not.
Rule 2. Tensors on one storage are on one in a rerun too, in the same places: hooks may give each of them memory of its
own, and a region inside, which packs what it holds storage by storage, would take one for the other.
Rule 3. A leaf that requires grad, and is no positional argument, is passed as it is and watched, where the hooks may do
without it (`get_all_leaves`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import messages, torch_private
from actckpt._core.hooks import get_all_leaves
from actckpt._rerun.inputs import Call, Inputs, Restored, Survey

__all__ = ["held_inputs"]


#: Offset, shape and strides.
_Place = tuple[int, torch.Size, tuple[int, ...]]


class _SharedStorage:
    """Packed tensors that are on one storage (Rule 2)."""

    __slots__ = ("members", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        #: With offset, shape and strides of each, in elements, and its type.
        self.members: list[tuple[_C.HeldTensor, _Place, torch.dtype]] = []

    def restore(self) -> list[Tensor]:
        """Return the tensors for one rerun."""
        tensors = [held.restore() for held, *_ in self.members]
        storages = [_C.strided_storage_of(tensor) for tensor in tensors]
        if None in storages or len({storage.data_ptr() for storage in storages if storage is not None}) == 1:
            return tensors
        pairs = list(zip(tensors, self.members, strict=True))
        if any(tensor.shape != place[1] or tensor.dtype is not dtype for tensor, (_, place, dtype) in pairs):
            return tensors  # hooks that change this are reported where it is read
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=tensors[0].device).untyped_storage()
        return [_moved(tensor, memory, place) for tensor, (_, place, _) in pairs]


def _moved(tensor: Tensor, memory: torch.UntypedStorage, place: _Place) -> Tensor:
    """Return a copy of a tensor in other memory."""
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, *place)
    once = tuple(slice(1) if step == 0 else slice(None) for step in place[2])  # of elements that share an address
    result[once].copy_(tensor[once])
    result.__dict__.update(tensor.__dict__)
    return result.requires_grad_(tensor.requires_grad)


class _HeldTuple:
    """A tuple that holds packed tensors, and how to build it again."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.build = build
        self.parts = parts


class Packed(Inputs):
    """See NOTE [ Packed inputs ]."""

    def __init__(self, call: Call, survey: Survey, hooks: torch_private.Hooks, excluded: Sequence[Any] = ()) -> None:
        function, args, kwargs = call
        packing = _Packing(hooks, args)
        held_args = tuple([packing.hold(value) for value in args])
        held_kwargs = {name: packing.hold(value) for name, value in kwargs.items()}
        others = tuple(map(packing.without_packed, args))
        rest = Survey((function, others, {n: packing.without_packed(v) for n, v in kwargs.items()}), excluded)
        survey.tensors, survey.outside = rest.tensors, rest.outside
        shared = [storage for storage in packing.storages.values() if len(storage.members) > 1]
        #: By id() of the packed tensor.
        self._shared = {id(held): storage for storage in shared for held, *_ in storage.members}
        super().__init__((function, held_args, held_kwargs), survey)
        self._argument_ids = set(map(id, args)) | set(map(id, kwargs.values()))

    def restore(self) -> Restored:
        """As `Inputs.restore`."""
        restored = super().restore()
        unpacking, packed = _Unpacking(self._shared), restored.args
        try:
            restored.args = tuple([unpacking.restore(value) for value in packed])
            restored.kwargs = {name: unpacking.restore(value) for name, value in restored.kwargs.items()}
        except messages.HeldTensorChanged as changed:
            raise messages.changed_error(changed, packed) from None
        restored.tensors = [*restored.tensors, *unpacking.tensors]
        return restored


class _Packing:
    """One pass over the arguments of a region.

    Attributes:
        storages: storages of the packed tensors, by id().
    """

    def __init__(self, hooks: torch_private.Hooks, args: tuple[Any, ...]) -> None:
        self._pack, self._unpack = hooks
        self._positional_ids = set(map(id, args))
        self._gets_all_leaves = get_all_leaves(hooks)
        self._known: dict[int, Any] = {}
        self._keeps_ids: list[torch.UntypedStorage] = []
        self.storages: dict[int, _SharedStorage] = {}

    def hold(self, value: Any) -> Any:
        """Return what to hold of a value: itself, or what it was packed into."""
        if isinstance(value, Tensor):
            stays = value.is_leaf and value.requires_grad and id(value) not in self._positional_ids
            return value if stays and not self._gets_all_leaves else self._hold_tensor(value)
        kind = type(value)
        is_named = isinstance(value, tuple) and hasattr(kind, "_make") and not getattr(value, "__dict__", None)
        if kind is not tuple and not is_named:
            return value
        if id(value) not in self._known:
            parts = [self.hold(part) for part in value]
            is_same = all(new is old for new, old in zip(parts, value, strict=True))
            self._known[id(value)] = value if is_same else _HeldTuple(tuple if kind is tuple else kind._make, parts)
        return self._known[id(value)]

    def without_packed(self, value: Any) -> Any:
        """Return a value with None in the place of the tensors that were packed."""
        held = self._known.get(id(value), value)
        if isinstance(held, _C.HeldTensor):
            return None
        return held.build([self.without_packed(part) for part in value]) if isinstance(held, _HeldTuple) else value

    def _hold_tensor(self, tensor: Tensor) -> "_C.HeldTensor":
        # Packed once per place, since in a rerun of the outer region these may be different objects; unpacked as one.
        with torch.no_grad():
            held = _C.hold(tensor, self._pack, self._unpack)
        known: _C.HeldTensor = self._known.setdefault(id(tensor), held)
        if known is held:
            self._note_storage(tensor, held)
        return known

    def _note_storage(self, tensor: Tensor, held: "_C.HeldTensor") -> None:
        storage = _C.strided_storage_of(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
        if storage is None or tensor.is_conj() or tensor.is_neg():
            return
        self._keeps_ids.append(storage)
        shared = self.storages.setdefault(id(storage), _SharedStorage(storage.nbytes()))
        shared.members.append((held, (int(tensor.storage_offset()), tensor.shape, tensor.stride()), tensor.dtype))


class _Unpacking:
    """The arguments of one rerun; what was one object is one object (Rule 1)."""

    def __init__(self, shared: dict[int, _SharedStorage]) -> None:
        self.tensors: list[Tensor] = []
        self._shared = shared
        self._built: dict[int, Any] = {}

    def restore(self, value: Any) -> Any:
        """Return an argument by what is held of it."""
        kind = type(value)
        if kind is not _C.HeldTensor and kind is not _HeldTuple:
            return value
        if id(value) not in self._built:
            if kind is _HeldTuple:
                self._built[id(value)] = value.build([self.restore(part) for part in value.parts])
            else:
                self._restore_tensor(value)
        return self._built[id(value)]

    def _restore_tensor(self, value: "_C.HeldTensor") -> None:
        shared = self._shared.get(id(value))
        with torch.no_grad():
            tensors = [value.restore()] if shared is None else shared.restore()
        self.tensors += tensors
        members = [value] if shared is None else [held for held, *_ in shared.members]
        self._built.update((id(held), tensor) for held, tensor in zip(members, tensors, strict=True))


def held_inputs(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hooks: torch_private.Hooks | None,
    excluded: Sequence[Any] = (),
) -> Inputs:
    """Hold the inputs of a region: packed where hooks are active outside, else as they are.

    Args:
        hooks: (pack, unpack) for the tensors where none are active outside; None: hold the tensors.
        excluded: objects that reruns find as they are, whatever of them the function reaches.
    """
    call = (function, args, kwargs)
    outer = torch_private.outer_hooks() or hooks
    survey = Survey(call, excluded)
    return Inputs(call, survey) if outer is None else Packed(call, survey, outer, excluded)
