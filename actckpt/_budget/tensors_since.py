"""Which tensors a program has made since some moment, and holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from actckpt._core.torch_private import fake_tensor_type

__all__ = ["TensorsSince"]


class TensorsSince:
    """Finds tensors that Python has objects for which did not exist before.

    Objects are young until the collector has looked at them twice. So long as it did not, only young ones are looked
    at, which takes little time; else all objects of the process are, and what is old is not known to be.
    """

    def __init__(self) -> None:
        self._num_collections = _num_collections()
        self._known = {id(tensor): weakref.ref(tensor) for tensor in _young()}

    def found(self) -> tuple[list[Tensor], bool]:
        """Return these tensors, and whether there is none among them that existed before."""
        is_exact = _num_collections() == self._num_collections
        tensors = _young() if is_exact else _tensors(gc.get_objects())
        return [each for each in tensors if not self._is_known(each)], is_exact

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor


def _num_collections() -> int:
    """Return how often objects became old."""
    _, middle, old = gc.get_stats()
    return int(middle["collections"]) + int(old["collections"])


def _young() -> list[Tensor]:
    # One generation after the other: the list of one must not come to be in another, which would keep all of it alive.
    return _tensors(gc.get_objects(0)) + _tensors(gc.get_objects(1))


def _tensors(objects: Iterable[Any]) -> list[Tensor]:
    # Fake tensors, which compilers leave behind, have no memory, and sizes that are no numbers.
    return [each for each in objects if issubclass(type(each), Tensor) and not issubclass(type(each), fake_tensor_type)]
