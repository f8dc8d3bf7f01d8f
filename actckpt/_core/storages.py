"""The storages behind tensors and whatever holds tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from actckpt._core import torch_private
from actckpt._core.subclasses import parts_of

__all__ = ["gradient_of", "storages_of", "tensors_in"]

_COMPRESSED_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),
}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter. One that is a view (FSDP1, unrolled updates) has none, and torch warns."""
    return parameter.grad if parameter.is_leaf else None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def storages_of(value: object) -> Iterator[torch.UntypedStorage]:
    """Every storage that is reachable from an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_storages(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from storages_of(item)
    elif isinstance(value, dict):
        yield from storages_of(tuple(value.values()))
    elif isinstance(value, torch.UntypedStorage):
        yield value


def _tensor_storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        parts, _ = parts_of(tensor)
        yield from storages_of(list(parts.values()))
    elif tensor.layout in _COMPRESSED_PARTS:
        yield from storages_of([getattr(tensor, part)() for part in _COMPRESSED_PARTS[tensor.layout]])
    elif torch_private.is_wrapped(tensor):
        yield from _tensor_storages(torch_private.unwrapped(tensor))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
