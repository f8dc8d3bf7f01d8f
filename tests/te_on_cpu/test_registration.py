"""How TransformerEngine is found, and what happens with a version whose insides are unknown."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import actckpt
from actckpt._core import extensions
from actckpt.doctor import examine
from actckpt.errors import TransformerEngineError
from actckpt.te import registration
from actckpt.te.internals import Internals

pytestmark = pytest.mark.usefixtures("anew")


def _region() -> None:
    x = torch.randn(3, requires_grad=True)
    actckpt.checkpoint(torch.sin, x).sum().backward()


def test_the_extension_is_registered_at_the_first_region_after_loading(te: Any) -> None:
    assert not extensions.around_regions
    for _ in range(2):
        _region()
        assert len(extensions.around_regions) == 1 and len(extensions.excludes_from_offload) == 1
    actckpt.te.ignore()
    assert not extensions.around_regions and not extensions.excludes_from_offload


def test_a_package_that_is_still_being_imported_is_left_alone(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as importing:
        importing.setattr(te, "__spec__", type("Spec", (), {"_initializing": True})())
        _region()
        assert not extensions.around_regions
    _region()
    assert extensions.around_regions


def _state() -> Any:
    manager = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    return getattr(manager, "quantization_state", manager)


#: Names of transformer_engine.pytorch that a version may lack; of several this version has one.
_NAMES: dict[str, tuple[str, ...]] = {
    "flags": ("distributed._ACTIVATION_RECOMPUTE_PHASE", "distributed._FP8_ACTIVATION_RECOMPUTE_PHASE"),
    "states of the tracker": ("distributed.get_all_rng_states",),
    "recompute": ("distributed.activation_recompute_forward",),
    "manager": ("quantization.FP8GlobalStateManager.set_autocast_state",),
    "offloading": ("cpu_offload.OFFLOAD_SYNCHRONIZER", "cpu_offload.CPUOffloadEnabled"),
    "modules": ("module.base.TransformerEngineBaseModule.prepare_forward",),
    "casts": ("tensor.Float8Tensor",),
    "quantizers": ("tensor.Quantizer",),
}


@pytest.mark.parametrize("what", _NAMES)
def test_a_name_that_is_missing_raises_with_the_versions_and_the_name(
    te: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for name in _NAMES[what]:
        monkeypatch.delattr(f"transformer_engine.pytorch.{name}", raising=False)
    named = _NAMES[what][0].rpartition(".")[2] if len(_NAMES[what]) == 1 else "flag"
    for _ in range(2):  # not only the first time
        with pytest.raises(
            TransformerEngineError, match=rf"(?s)2\.\d+\.\d is not as .*2\.9 to 2\.20\.2.*{named}.*actckpt\.te\.ignore"
        ):
            _region()
    assert "is not as actckpt knows it" in _finding()
    actckpt.te.ignore()
    _region()


@pytest.mark.parametrize("name", ["depth", "fp8_tensors_recompute_buffer"])
def test_state_that_is_missing_raises(te: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names = ("autocast_depth", "AUTOCAST_DEPTH") if name == "depth" else (name,)
    for one in names:
        for owner in (_state(), type(_state())):
            monkeypatch.delattr(owner, one, raising=False)
    with pytest.raises(TransformerEngineError, match=name):
        _region()


def test_an_autocast_state_of_other_fields_raises(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    monkeypatch.setattr(manager, "get_autocast_state", lambda: (1, 2))
    with pytest.raises(TransformerEngineError, match="6 fields of the autocast state"):
        _region()


def test_a_module_that_is_missing_raises(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch.quantization")
    with pytest.raises(TransformerEngineError, match=r"pytorch\.quantization"):
        _region()


def test_ignore_takes_everything_back(te: Any) -> None:
    tensor = sys.modules["transformer_engine.pytorch.tensor"]
    owners: dict[Any, tuple[str, ...]] = {
        te.distributed.activation_recompute_forward: ("__enter__", "__exit__"),
        sys.modules["transformer_engine.pytorch.ops.fuser"].OperationFuser: ("__call__",),
        sys.modules["transformer_engine.pytorch.module.base"].TransformerEngineBaseModule: ("prepare_forward",),
        tensor.Float8Tensor: ("quantize_",),
        tensor.Quantizer: ("calibrate",),
    }
    before = {(owner, name): vars(owner).get(name) for owner, names in owners.items() for name in names}
    _region()
    assert all(vars(owner).get(name) is not method for (owner, name), method in before.items())
    actckpt.te.ignore()
    assert all(vars(owner).get(name) is method for (owner, name), method in before.items())
    assert registration.provider() is None
    _region()


def test_the_state_of_each_layout_is_read_and_written(te: Any) -> None:
    internals = Internals()
    internals.flags = (True, True)
    assert all(getattr(te.distributed, name) for name in vars(te.distributed) if name.endswith("RECOMPUTE_PHASE"))
    internals.autocast_depth = 3
    assert getattr(_state(), "autocast_depth", None) == 3 or getattr(_state(), "AUTOCAST_DEPTH", None) == 3
    internals.queues = ["queue"]
    assert _state().fp8_tensors_recompute_buffer == ["queue"]


def _finding() -> str:
    return dict(examine(measure=False))["transformer engine"]


def test_doctor_says_what_is_active(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["transformer_engine"]
    assert _finding().startswith(f"{package.__version__} (read): regions carry FP8 state")
    monkeypatch.setattr(package, "__version__", "2.99.1")
    assert _finding().startswith("2.99.1 (newer than what was read (2.20.2)")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # importing it fails
    assert "is installed but does not load: ModuleNotFoundError" in _finding()
