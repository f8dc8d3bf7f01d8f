"""The geometry of tensors, read through DLPack's C exchange API and one attribute at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from actckpt import _C, _bind
from actckpt._C import Value, window_of

_CAPSULE = b"dlpack_exchange_api"


def _read(tensor: Tensor) -> tuple[Any, ...]:
    window = window_of(tensor, Value(0, tensor.device, 1))
    return window.dtype, window.shape, window.stride, window.offset, window.is_conj, window.is_neg


def _expected(tensor: Tensor) -> tuple[Any, ...]:
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), is_conj, is_neg


@pytest.fixture
def _reconnected() -> Iterator[None]:
    yield
    _C.connect(_bind.NAMES)


#: Tensors of float32 and complex64: those of other types follow.
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda t: t[1:, 2:4],
    "expanded": lambda t: t[:, :1].expand(4, 5),
    "scalar": lambda t: t[0, 0],
    "empty": lambda t: t[:0],
    "many dims": lambda t: t.view(1, 2, 2, 1, 3, 2, 1).permute(6, 5, 4, 3, 2, 1, 0),
    "odd strides": lambda t: t.as_strided((2, 1, 1), (3, 7, 0), 5),
    "parameter": torch.nn.Parameter,
    "conjugated": lambda t: torch.complex(t, t).conj(),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "meta": lambda t: t.to("meta")[:, 1],
}


@pytest.fixture(params=["torch's", None])
def _exchange_api(request: pytest.FixtureRequest, _reconnected: None) -> None:
    if request.param is None:
        _C.connect(_bind.NAMES | {"exchange_api": None})


@pytest.mark.usefixtures("_exchange_api")
@pytest.mark.parametrize("name", TENSORS)
def test_a_window_has_the_geometry_of_its_tensor(name: str) -> None:
    tensor = TENSORS[name](torch.randn(4, 6))
    assert _read(tensor) == _expected(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_data_type_is_told_from_those_read_before() -> None:
    """DLPack has one description for `torch.int4` and `torch.int8`, whichever comes first."""
    dtypes = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    dtypes = [dtype for dtype in dtypes if not str(dtype).startswith("torch.q")]  # `empty` gives these no quantizer
    for order in (dtypes, dtypes[::-1]):
        for dtype in order:
            tensor = torch.empty(2, 3, dtype=dtype)[1:]
            assert _read(tensor) == _expected(tensor)


class _Longer(Tensor):
    """Says that it has more dimensions than it has strides."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([1] * 9)


def test_a_shape_that_does_not_go_with_the_strides_raises() -> None:
    with pytest.raises(ValueError, match=r"_Longer says that it has 9 dimensions, but its strides are 2\."):
        _read(torch.randn(2, 3).as_subclass(_Longer))


_Fill = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Table(ctypes.Structure):
    """`DLPackExchangeAPI` of dlpack.h 1.3."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", _Fill),
        ("current_work_stream", ctypes.c_void_p),
    ]


@pytest.mark.usefixtures("_reconnected")
@pytest.mark.parametrize(("version", "is_used"), [((1, 3), True), ((1, 4), True), ((1, 2), False), ((2, 3), False)])
def test_only_tables_of_known_versions_are_used(version: tuple[int, int], is_used: bool) -> None:
    calls = []

    def refuse(_tensor: int, _out: int) -> int:
        calls.append(1)
        return -1

    table = _Table(*version, dltensor_from_py_object_no_sync=_Fill(refuse))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(ctypes.addressof(table), _CAPSULE, None)
    _C.connect(_bind.NAMES | {"exchange_api": capsule})
    tensor = torch.randn(2, 3).t()
    assert _read(tensor) == _expected(tensor)
    assert bool(calls) is is_used


@pytest.mark.usefixtures("_reconnected")
def test_what_is_no_capsule_of_the_exchange_api_is_not_used() -> None:
    for other in (object(), 12345):
        _C.connect(_bind.NAMES | {"exchange_api": other})
        tensor = torch.randn(2, 3)
        assert _read(tensor) == _expected(tensor)
