"""Private names of torch: each is there, and what older versions lack has a way around it that works.

A failure of the first test means that torch changed: see the entry in actckpt/_core/torch_private/.
Where torch made the name public, use that one and delete the entry.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
import torch.utils.checkpoint

from actckpt._core import torch_private
from actckpt._core.torch_private import settings as torch_settings
from actckpt._core.torch_private.lookup import LOOKED_UP, needed

#: What is read of objects of torch, and not looked up at import.
NAMES = [
    (torch._C, "_dispatch_get_all_op_names"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
    (torch.UntypedStorage, "resize_"),
    (torch.UntypedStorage, "_share_fd_cpu_"),
    (torch.UntypedStorage, "_share_filename_cpu_"),
    (torch.ops.aten.mm.default, "_op"),
    (torch.utils._python_dispatch, "_is_in_torch_dispatch_mode"),
    (torch.utils._python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (torch.utils._python_dispatch, "_is_in_any_mode_without_ignore_compile_internals"),
    (torch.autograd.graph.Node, "_input_metadata"),
    (torch.autograd.graph.Node, "_sequence_nr"),
]
#: Those that not every torch has, with the first that does and the last, and those of CUDA.
OPTIONAL = {
    "torch.Tensor.__dlpack_c_exchange_api__": ((2, 10), None),
    "torch._C._get_graph_exec_group": ((2, 10), None),
    "torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals": ((2, 10), None),
    "torch.autograd.Function.apply.__func__.__code__": (None, (2, 14)),
}

#: Settings that the oldest torch does not have: one that does.
SETTINGS_SINCE = {"fa3_sdp_enabled": (2, 11), "cudnn_depthwise_kernel": (2, 13)}


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_installed_torch_has_the_private_name(owner: Any, name: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {name} any more: look for its public successor."


@pytest.mark.parametrize("path", sorted(path for path, is_needed in LOOKED_UP.items() if is_needed or path in OPTIONAL))
def test_installed_torch_has_what_is_looked_up_at_import(path: str) -> None:
    first, until = OPTIONAL.get(path, (None, None))
    if (first and torch.__version__ < first) or (until and torch.__version__ >= until):
        pytest.skip(f"torch {torch.__version__} does not have {path}")
    needed(path)  # fails: look for its public successor


def test_a_torch_for_cuda_labels_memory() -> None:
    if not torch.backends.cuda.is_built() or torch.version.hip is not None or torch.__version__ < (2, 11):
        assert torch.backends.cuda.is_built() or torch_private.set_memory_label is None
        pytest.skip("torch is built for the CPU or for HIP, or is older than 2.11, the first that was looked at")
    assert torch_private.set_memory_label is not None and torch_private.get_memory_label is not None
    assert hasattr(torch.cuda.memory, "_set_memory_metadata"), (
        "look for its public successor, and name that in messages"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for kind in ("elements", "cpus", "cuda", "hip")
        for name in getattr(torch_settings, f"NUMERIC_OF_{kind.upper()}")
    ],
)
def test_installed_torch_tells_and_sets_the_setting(name: str, kind: str) -> None:
    if torch.__version__ < SETTINGS_SINCE.get(name, (2, 9)):
        pytest.skip(f"torch {torch.__version__} is older than {name}")
    found = [flag for flag, _, _ in getattr(torch_settings, f"flags_of_{kind}")]
    assert name in found, f"torch {torch.__version__} has no _get_{name} with a setter: it is left alone now"
    assert [flag for _, flag in torch_settings.python_flags] == ["_is_fastpath_enabled", "enabled", "strategy"]


def test_nodes_tell_their_order_and_the_bytes_of_gradients() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    y = x * 2.0
    halves = y.half().split(2, dim=1)
    number = torch_private.next_sequence_number()
    assert torch_private.sequence_number(y.grad_fn) < torch_private.sequence_number(halves[0].grad_fn) < number
    assert torch_private.gradient_bytes(y.grad_fn, 0) == 48
    assert torch_private.gradient_bytes(halves[1].grad_fn, halves[1].output_nr) == 12


def test_calls_of_a_module_that_this_thread_is_in_are_counted() -> None:
    class Recursive(torch.nn.Module):
        def forward(self, depth: int) -> list[int]:
            return [torch_private.num_calls(self), *(self(depth - 1) if depth else [])]

    module = Recursive()
    assert torch.nn.Sequential(module)(2) == [1, 2, 3]
    module.register_forward_pre_hook(lambda module, _: None)
    assert torch.nn.Sequential(module)(2) == [1, 2, 3]
    assert torch_private.num_calls(module) == 0


def test_the_node_of_a_tensor_is_known_whatever_its_class_says() -> None:
    class Other(torch.Tensor):
        @property
        def grad_fn(self) -> None:  # type: ignore[override]
            raise KeyError("mine")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert torch_private.node_of(y) is y.grad_fn and torch_private.node_of(x) is None
    assert torch_private.node_of(torch.ones(2).as_subclass(Other)) is None


@pytest.mark.parametrize("name", sorted(torch_private.OBSERVING_MODES))
def test_installed_torch_has_the_observing_mode(name: str) -> None:
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind)
    except ImportError as error:  # a build without distributed, or an older torch
        pytest.skip(str(error))
    assert f"{found.__module__}.{found.__qualname__}" in torch_private.OBSERVING_MODES
    assert "__torch_dispatch__" in vars(found)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch that is built without distributed")
def test_installed_torch_has_work_that_operators_may_return() -> None:
    assert "Work" in str(torch_private.finished_work()._type())


def test_effects_of_operators_are_told_in_one_of_the_known_ways_or_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = importlib.import_module("torch._higher_order_ops.effects")
    names = [name for name in ("_get_effect", "SIDE_EFFECTS") if hasattr(effects, name)]
    assert names, f"torch {torch.__version__} tells effects of operators in another way: see has_registered_effect"
    for name in names:
        monkeypatch.delattr(effects, name)
    assert not torch_private.has_registered_effect(torch.ops.aten._print.default)


def test_a_function_is_marked_for_the_compiler_as_by_its_public_name() -> None:
    def function() -> bool:
        return True

    public = torch.compiler.assume_constant_result(lambda: True)
    assert vars(torch_private.called_while_traced(function)) == vars(public)


def test_fake_tensors_of_one_storage_share_it_and_let_go_of_it() -> None:
    mode = torch_private.fake_mode()
    storage = torch.UntypedStorage(64, device="meta")
    one = torch_private.new_fake(mode, storage, torch.float32, (2, 4), (4, 1), 0)
    two = torch_private.new_fake(mode, storage, torch.int8, (8,), (2,), 3)
    assert one.untyped_storage() is two.untyped_storage() is storage
    assert (two.shape, two.stride(), two.storage_offset(), two.dtype) == ((8,), (2,), 3, torch.int8)
    assert (one + one).device.type == "cpu"
    with mode:
        torch.empty(0).set_(storage, 0, (2, 4), (4, 1))
    gone = weakref.ref(storage)
    del one, two, storage
    assert gone() is None  # torch's cache of fake operators holds storages that it was given


@pytest.mark.parametrize("before", [None, [0, 1, 2, 3, 4]])
def test_torch_puts_kernels_of_attention_in_order_before_settings_are_noted(
    monkeypatch: pytest.MonkeyPatch, before: list[int] | None
) -> None:
    """An order that the program has set stays. Without the name, a first region on a GPU may rerun another kernel."""

    def choose(*_: Any) -> int:
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        return 3

    assert torch_settings._choose_sdp is not None
    torch_settings.settle_sdp_order(torch.device("cpu"))
    monkeypatch.setattr(torch_settings, "_choose_sdp", choose)
    found = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order(before or found)
        torch_settings.settle_sdp_order(torch.device("cpu"))
        assert list(torch._C._get_sdp_priority_order()) == (before or [3, 1, 2, 0, 4])
    finally:
        torch._C._set_sdp_priority_order(found)


def test_without_tensor_hooks_a_gradient_does_not_meet_them() -> None:
    x, y, log = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    handle = x.register_hook(lambda grad: log.append(1) or grad * 2)
    product = (x * y).sum()
    with pytest.raises(KeyError), torch_private.without_tensor_hooks([x, y]):
        assert torch.equal(torch.autograd.grad(product, x, retain_graph=True)[0], torch.ones(2))
        raise KeyError
    assert not log
    assert torch.equal(torch.autograd.grad(product, x, retain_graph=True)[0], 2 * torch.ones(2)) and log
    handle.remove()
    assert torch.equal(torch.autograd.grad(product, x)[0], torch.ones(2))
