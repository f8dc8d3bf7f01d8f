"""How TransformerEngine is found, and what happens with versions whose insides are unknown."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from te_fakes import VERSIONS, installed

import actckpt
from actckpt._core import extensions
from actckpt.doctor import examine
from actckpt.errors import TransformerEngineError
from actckpt.te import registration
from actckpt.te.internals import Internals, read_already

_PACKAGE = Path(actckpt.__file__).parent


def _region() -> None:
    x = torch.randn(3, requires_grad=True)
    actckpt.checkpoint(torch.sin, x).sum().backward()


def test_importing_actckpt_loads_no_transformer_engine() -> None:
    code = "import sys, actckpt; assert not [name for name in sys.modules if name.startswith('transformer_engine')]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_extension_is_registered_at_the_first_region_after_loading(version: str) -> None:
    _region()
    assert not extensions.around_regions
    with installed(version):
        assert not extensions.around_regions
        _region()
        assert len(extensions.around_regions) == 1 and len(extensions.must_stay) == 1
        _region()
        assert len(extensions.around_regions) == 1
    assert not extensions.around_regions and not extensions.must_stay


def test_a_package_that_is_still_being_imported_is_left_alone() -> None:
    with installed() as te:
        te.tree["transformer_engine.pytorch"].__spec__ = type("Spec", (), {"_initializing": True})()
        _region()
        assert not extensions.around_regions
        te.tree["transformer_engine.pytorch"].__spec__._initializing = False
        _region()
        assert extensions.around_regions


@pytest.mark.parametrize("missing", ["get_all_rng_states", "activation_recompute_forward"])
def test_unknown_insides_raise_with_versions_and_what_is_missing(missing: str) -> None:
    with installed("2.20.2", without=missing):
        for _ in range(2):  # not only the first time
            with pytest.raises(TransformerEngineError, match=rf"2\.20\.2 is not as .*2\.9 to 2\.20\.2.*{missing}"):
                _region()
        actckpt.te.ignore()
        _region()


@pytest.mark.parametrize(
    "change",
    [
        lambda te: delattr(te.distributed, "_ACTIVATION_RECOMPUTE_PHASE"),
        lambda te: delattr(te.FP8GlobalStateManager, "set_autocast_state"),
        lambda te: delattr(te.manager_state(), "autocast_depth"),
        lambda te: delattr(te.manager_state(), "fp8_tensors_recompute_buffer"),
        lambda te: setattr(te.FP8GlobalStateManager, "get_autocast_state", lambda: (1, 2)),
        lambda te: delattr(te.offload, "OFFLOAD_SYNCHRONIZER"),
        lambda te: delattr(te.Base, "prepare_forward"),
        lambda te: delattr(te.tree["transformer_engine.pytorch.tensor"], "Float8Tensor"),
        lambda te: delattr(te.tree["transformer_engine.pytorch.tensor"], "Quantizer"),
        lambda te: sys.modules.pop("transformer_engine.pytorch.quantization"),
    ],
)
def test_each_difference_is_noticed(change: Any) -> None:
    with installed() as te:
        quantization = sys.modules["transformer_engine.pytorch.quantization"]
        change(te)
        try:
            with pytest.raises(TransformerEngineError, match=r"actckpt\.te\.ignore"):
                _region()
        finally:
            sys.modules["transformer_engine.pytorch.quantization"] = quantization


def test_ignore_takes_everything_back() -> None:
    with installed() as te:
        context, tensor = te.distributed.activation_recompute_forward, te.tree["transformer_engine.pytorch.tensor"]
        owners = {
            context: ("__enter__", "__exit__"),
            te.OperationFuser: ("__call__",),
            te.Base: ("prepare_forward",),
            tensor.Float8Tensor: ("quantize_",),
            tensor.Quantizer: ("calibrate",),
        }
        before = {(owner, name): vars(owner)[name] for owner, names in owners.items() for name in names}
        _region()
        assert all(vars(owner)[name] is not method for (owner, name), method in before.items())
        actckpt.te.ignore()
        assert all(vars(owner)[name] is method for (owner, name), method in before.items())
        assert registration.provider() is None
        _region()


def test_versions_that_were_read() -> None:
    for version in ("2.9", "2.9.0+cu13", "2.14.1", "2.20.2"):
        assert read_already(version)
    for version in ("2.8", "1.13", "2.20.3", "2.21", "3.0", "unknown"):
        assert not read_already(version)


def test_one_file_knows_the_insides() -> None:
    """Names of TransformerEngine's insides stand in actckpt/te/internals.py alone."""
    insides = (
        "_recompute_buffer",
        "_RECOMPUTE_",
        "_fp8_workspaces",
        "_TE_",
        "quantization_state",
        "fp8_meta",
        "OFFLOAD_",
    )
    for path in _PACKAGE.rglob("*.py"):
        if path == _PACKAGE / "te" / "internals.py":
            continue
        texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        attributes = [n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        for name in insides:
            assert not any(name in text for text in (*texts, *attributes) if isinstance(text, str)), f"{path}: {name}"


def test_the_old_and_the_new_layout_are_read_alike() -> None:
    for version in VERSIONS:
        with installed(version) as te:
            found = Internals()
            assert found.version == version
            found.flags = (True, True)
            assert te.flags() == (True, True)
            found.autocast_depth = 3
            assert getattr(te.manager_state(), te.depth_name) == 3
            found.queues = ["queue"]
            assert te.manager_state().fp8_tensors_recompute_buffer == ["queue"]


def test_doctor_says_what_is_active() -> None:
    def finding() -> str:
        return dict(examine(measure=False))["transformer engine"]

    assert finding().startswith("not installed: pip install")
    with installed("2.20.2"):
        assert finding().startswith("2.20.2 (read): regions carry FP8 state")
    with installed("2.99.1"):
        assert finding().startswith("2.99.1 (newer than what was read (2.20.2)")
    with installed("2.20.2", without="get_all_rng_states"):
        assert "off: TransformerEngine 2.20.2 is not as actckpt knows it" in finding()
    with installed("2.20.2") as te:
        del sys.modules["transformer_engine.pytorch"]
        assert "is installed but does not load: ModuleNotFoundError" in finding()
        sys.modules["transformer_engine.pytorch"] = te.tree["transformer_engine.pytorch"]
