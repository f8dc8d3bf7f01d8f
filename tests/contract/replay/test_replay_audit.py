"""Audits: kernels that write behind the dispatcher never give a wrong gradient, from the first step on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from internals.stores import PythonStore, flush, store_in_memory, using
from on_device import memory_of
from oracle import assert_equal, num_checksums
from torch import Tensor

import actckpt


class IntoFreshMemory(torch.autograd.Function):
    """Its result comes from a raw kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        memory_of(out)[:] = memory_of(x) * 3
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class IntoRecordedValue(torch.autograd.Function):
    """A raw kernel overwrites what a recorded operator made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        memory_of(out)[:] = memory_of(x) * 5
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def _step(function: Any, x: Tensor, region: Any) -> Tensor:
    with region:
        y = (function.apply(x.sin()) * x).exp()
    return torch.autograd.grad(y.sum(), x)[0]


def _use_the_store() -> None:
    with actckpt.offload(min_bytes=0):
        torch.ones(3, requires_grad=True).exp().sum().backward()


@pytest.mark.parametrize("function", [IntoFreshMemory, IntoRecordedValue])
@pytest.mark.filterwarnings("ignore:.*came back from replay with other bytes:UserWarning")
@pytest.mark.parametrize("has_store", [False, True])
def test_rule_6_a_raw_write_never_gives_a_wrong_gradient(function: Any, has_store: bool) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    expected = _step(function, x, nullcontext())
    if has_store:
        _use_the_store()
    refused = 0
    for _ in range(5):
        try:
            found = _step(function, x, actckpt.region())
        except actckpt.errors.AuditError as error:
            assert "configure(opaque=" in str(error)
            refused += 1
        else:
            assert_equal(found, expected)
    assert refused == 0 if function is IntoFreshMemory else refused <= 1


def test_rule_6_the_line_that_the_error_gives_helps() -> None:
    x = torch.randn(4, 7, requires_grad=True)
    actckpt.configure(opaque=["aten.mul.Tensor"])
    assert_equal(_step(IntoRecordedValue, x, actckpt.region()), _step(IntoRecordedValue, x, nullcontext()))


def _num_checksums(shape: int) -> int:
    """Return how many checksums a region computes; all calls have one site."""
    x = torch.randn(shape, requires_grad=True)

    def program() -> None:
        with actckpt.region():
            x.sin().exp()

    return num_checksums(program)


def test_rule_6_more_than_64_structures_per_site_are_sampled() -> None:
    actckpt.configure(audit="off")
    assert _num_checksums(1) == 0
    actckpt.configure(audit="first")
    assert min(map(_num_checksums, range(1, 66))) > 0  # each of 65 shapes for the first time
    assert sum(_num_checksums(shape) > 0 for shape in range(66, 66 + 64)) == 64 // 16
    actckpt.configure(audit="always")
    assert min(map(_num_checksums, range(200, 220))) > 0


@pytest.fixture
def _own_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "spill"
    folder.mkdir()
    actckpt.configure(spill_dir=folder)
    return folder


@pytest.mark.parametrize("function", [torch.sin, IntoFreshMemory.apply])
def test_an_audit_does_not_fail_where_its_store_cannot_be_made(function: Any, _own_folder: Path) -> None:
    _use_the_store()
    _own_folder.rmdir()
    actckpt.configure(max_inflight="1MiB")  # from now on a store would have to be made in the folder that is gone
    x = torch.randn(11, 3, requires_grad=True)
    with actckpt.region() as r:
        y = function(x.exp()).exp()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert_equal(found, torch.autograd.grad(function(x.exp()).exp().sum(), x)[0])
    assert r.report().recomputed_bytes > 0


def test_an_audit_does_not_fail_where_its_store_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def refuse(self: Any, source: Any, nbytes: int, *, must: bool = True) -> None:
        refused.append(nbytes)
        raise actckpt.errors.OffloadError("refused")

    monkeypatch.setattr(PythonStore, "put", refuse)
    x = torch.randn(12, 3, requires_grad=True)
    with using(PythonStore(store_in_memory())):
        with actckpt.region():
            y = x.exp().sin()
        assert refused
        assert_equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_an_audit_does_not_fail_in_a_child_process_that_may_not_use_its_store() -> None:
    code = """if True:
        import os, torch, actckpt
        with actckpt.offload(min_bytes=0):
            torch.ones(3, requires_grad=True).exp().sum().backward()
        child = os.fork()
        if child == 0:
            x = torch.ones(3, requires_grad=True)
            with actckpt.region():
                y = x.exp().sin()
            y.sum().backward()
            os._exit(0)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_original_that_cannot_be_read_back_is_an_audit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise actckpt.errors.OffloadError("the disk broke")

    x = torch.randn(14, 3, requires_grad=True)
    with using(PythonStore(store_in_memory())):
        with actckpt.region():
            y = (IntoRecordedValue.apply(x.sin()) * x).exp()
        flush()
        monkeypatch.setattr(PythonStore, "fetch", broken)
        with pytest.raises(actckpt.errors.AuditError) as raised:
            y.sum().backward()
    assert "the disk broke" in str(raised.value.__cause__)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch runs LSTM without oneDNN")
def test_workspaces_are_not_compared_where_a_policy_keeps_the_results_before_them() -> None:
    layer, x = torch.nn.LSTM(32, 32, batch_first=True), torch.randn(8, 16, 32, requires_grad=True)
    expected = torch.autograd.grad(layer(x)[0].sum(), x)
    made = "LSTM::aten.mkldnn_rnn_layer.default#0"
    found = []
    with actckpt.region(lambda info: found.append((str(info.place), info.index)) or "recompute"):
        layer(x)
    assert (f"{made}.3", 3) in found
    for filler in range(4):
        with actckpt.region({f"{made}.{number}": "keep" for number in range(3)}):
            y = layer(x)[0]
        torch.full((266240,), filler, dtype=torch.uint8)  # what the workspace of the replay is likely to hold
        assert_equal(torch.autograd.grad(y.sum(), x), expected)


def test_seeds_of_a_dropout_that_attention_does_not_have_are_not_compared() -> None:
    """Such results of kernels for GPUs hold what their memory held before."""
    unwritten = itertools.count()
    with torch.library._scoped_library("xformers_flash", "FRAGMENT") as library:
        library.define("flash_fwd(Tensor query) -> (Tensor, Tensor, Tensor)")
        library.impl(
            "flash_fwd",
            lambda query: (query.sin(), query.exp(), torch.tensor(next(unwritten))),
            "CompositeExplicitAutograd",
        )

        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
                out, sums, seed = torch.ops.xformers_flash.flash_fwd(query)
                ctx.save_for_backward(query, sums, seed)
                return out

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                query, sums, _ = ctx.saved_tensors
                return grad * query.cos() * sums

        x = torch.randn(6, 3, requires_grad=True)
        expected = torch.autograd.grad(Attention.apply(x * 2).exp().sum(), x)
        actckpt.configure(audit="always")
        for _ in range(2):
            with actckpt.region():
                y = Attention.apply(x * 2).exp().sum()
            before = next(unwritten)
            assert_equal(torch.autograd.grad(y, x), expected)
            assert next(unwritten) > before + 1, "it was not replayed"
