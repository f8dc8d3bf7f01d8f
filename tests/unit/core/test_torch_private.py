"""Private names of torch: each is there, and what may be missing has a way around it that works.

A failure of the first test means that torch changed: see the entry in actckpt/_core/torch_private.py, whose
comment says what happens without the name. Where torch made the name public, use that one and delete the entry.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import actckpt
from actckpt import _C, _bind
from actckpt._core import torch_private

NAMES = [
    (torch._C, "_current_graph_task_id", "required: how backwards are told apart"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks", "optional: inputs go through an autograd.Function"),
    (torch._C._autograd, "_push_saved_tensors_default_hooks", "required: public is saved_tensors_hooks"),
    (torch._C._autograd, "_pop_saved_tensors_default_hooks", "required: public is saved_tensors_hooks"),
    (torch._C, "_set_grad_enabled", "required: public is torch.set_grad_enabled"),
    (Variable._execution_engine, "queue_callback", "optional: unused values stay until the graph is freed"),
    (torch._C, "_is_any_autocast_enabled", "optional: every region captures autocast in detail"),
    (torch._C, "_len_torch_function_stack", "optional: function modes are not restored"),
    (torch._C, "_get_function_stack_at", "goes with _len_torch_function_stack"),
    (torch._C, "_push_on_torch_function_stack", "goes with _len_torch_function_stack"),
    (torch._C, "_pop_torch_function_stack", "goes with _len_torch_function_stack"),
    (torch._C, "_len_torch_dispatch_stack", "required: modes that change results must not go unseen"),
    (torch._C, "_get_dispatch_stack_at", "goes with _len_torch_dispatch_stack"),
    (torch._C, "_push_on_torch_dispatch_stack", "goes with _len_torch_dispatch_stack"),
    (torch._C, "_pop_torch_dispatch_stack", "goes with _len_torch_dispatch_stack"),
    (torch._C, "_get_dispatch_mode", "optional: offloading and audits raise under make_fx"),
    (torch._C._TorchDispatchModeKey, "PROXY", "goes with _get_dispatch_mode"),
    (torch._C, "_set_fwd_grad_enabled", "optional: what has no formula for tangents raises under jvp"),
    (torch._C, "_is_fwd_grad_enabled", "goes with _set_fwd_grad_enabled"),
    (torch._C._functorch, "peek_interpreter_stack", "optional: regions raise inside of transforms"),
    (torch._C._functorch, "pop_dynamic_layer_stack", "goes with peek_interpreter_stack"),
    (torch._C._functorch, "push_dynamic_layer_stack", "goes with peek_interpreter_stack"),
    (torch.Tensor, "_is_zerotensor", "optional: audits raise under jvp where a tangent is zero"),
    (forward_ad, "_current_level", "optional: tangents may always be there"),
    (torch.utils._device, "CURRENT_DEVICE", "optional: what torch.get_default_device reads"),
    (torch.UntypedStorage, "resize_", "optional: public; what it frees is not waited for"),
    (torch.UntypedStorage, "_share_fd_cpu_", "optional: memory moved to shared memory is not waited for"),
    (torch.UntypedStorage, "_share_filename_cpu_", "goes with _share_fd_cpu_"),
    (torch.utils.checkpoint, "_enable_checkpoint_early_stop", "optional: set_checkpoint_early_stop does nothing"),
    (torch.utils.checkpoint, "_checkpoint_debug_enabled", "optional: set_checkpoint_debug_enabled does nothing"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph", "optional: bytes are held longer in backward"),
    (torch.Tensor, "__dlpack_c_exchange_api__", "optional: newer than torch 2.9; geometry is read one by one"),
    (torch.ops.aten.mm.default, "_op", "optional: operators are called through a Python frame"),
    (torch._C, "_AutoDispatchBelowAutograd", "optional: replay turns grad mode off for operators in place"),
    (torch.utils.checkpoint, "_CachingTorchDispatchMode", "optional: context_fn has torch's limits"),
    (torch._C, "_dispatch_get_all_op_names", "optional, in operator_names: names are not checked, none are suggested"),
    (torch._subclasses.fake_tensor, "FakeTensor", "optional: regions under FakeTensorMode raise"),
    (torch, "_disable_dynamo", "optional: the compiler looks into regions of TransformerEngine"),
    (torch._C, "_get_deterministic_algorithms", "required: public is a Python function"),
    (torch._C, "_get_deterministic_algorithms_warn_only", "required: public is a Python function"),
    (torch._C, "_set_deterministic_algorithms", "required: the public one sets more"),
    (torch._C, "_get_fp32_precision_getter", "optional: precisions of float32 are left alone"),
    (torch._C, "_set_fp32_precision_setter", "goes with _get_fp32_precision_getter"),
    (torch._C, "_get_float32_matmul_precision", "optional: public; what it tells may not fit the precision in force"),
    (torch._C, "_get_cudnn_allow_tf32", "optional: public; what it tells may not fit the precision in force"),
    (torch.Tensor, "_cdata", "required: how swap_tensors is seen"),
    (torch.Tensor, "_backward_hooks", "required: hooks of parameters must not run twice"),
    (torch._C, "_FunctionBase", "required: how what an autograd.Function made is recognised"),
    (torch.utils._python_dispatch, "_pop_mode", "required where a signal handler raises as a region opens or closes"),
    (torch.utils._python_dispatch, "_push_mode", "goes with _pop_mode"),
    (torch.utils._python_dispatch, "_is_in_torch_dispatch_mode", "goes with _pop_mode"),
    (torch.utils._python_dispatch, "_is_in_non_infra_torch_dispatch_mode", "goes with _pop_mode"),
    (torch._C._autograd, "_get_sequence_nr", "optional: what compiled code returns counts as an input of a region"),
    (torch.autograd.Function.apply, "__func__", "optional: what compiled code saves counts as an input of a region"),
]


@pytest.mark.parametrize(("owner", "name", "without"), NAMES, ids=[name for _, name, _ in NAMES])
def test_installed_torch_has_the_private_name(owner: Any, name: str, without: str) -> None:
    if name == "__dlpack_c_exchange_api__" and torch.__version__ < (2, 10):
        pytest.skip(f"torch {torch.__version__} is older than {name}")
    assert hasattr(owner, name), (
        f"torch {torch.__version__} has no {name} any more ({without}). Look for its public successor, use it in "
        "actckpt/_core/torch_private.py, and delete this entry."
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for kind in ("elements", "cpus", "cuda", "hip")
        for name in getattr(torch_private, f"NUMERIC_OF_{kind.upper()}")
    ],
)
def test_installed_torch_tells_and_sets_the_setting(name: str, kind: str) -> None:
    if torch.__version__ < (2, 13):
        pytest.skip(f"torch {torch.__version__} may be older than {name}")
    found = [flag for flag, _, _ in getattr(torch_private, f"flags_of_{kind}")]
    assert name in found, f"torch {torch.__version__} has no _get_{name} with a setter: it is left alone now"


def test_installed_torch_has_the_flags_of_python_code() -> None:
    assert [flag for _, flag in torch_private.python_flags] == ["_is_fastpath_enabled", "enabled", "strategy"]


@pytest.mark.parametrize("name", sorted(torch_private.OBSERVING_MODES))
def test_installed_torch_has_the_observing_mode(name: str) -> None:
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind)
    except ImportError as error:  # a build without distributed, or an older torch
        pytest.skip(str(error))
    assert f"{found.__module__}.{found.__qualname__}" in torch_private.OBSERVING_MODES
    assert "__torch_dispatch__" in vars(found)


def test_every_private_name_of_torch_is_checked_here() -> None:
    public = {
        "Any",
        "Callable",
        "Flag",
        "Hooks",
        "Iterator",
        "Sequence",
        "TypeVar",
        "Variable",
        "contextmanager",
        "forward_ad",
        "partial",
        "torch",
    }
    functions = {
        "below_transforms",
        "is_tracing",
        "tangents_enabled",
        "are_on_top",
        "callee_of",
        "disable_dynamo",
        "is_compiled_function",
        "forced_by_context",
        "function_modes",
        "graph_break",
        "implementation_of",
        "knows_outer_hooks",
        "outer_hooks",
        "remove_dispatch_mode",
        "replaced_function_modes",
        "selective_policy",
        "set_selective_policy",
        "unsharded_parameter",
        "wait_for_collective",
        "when_backward_ends",
        "without_tensor_hooks",
    }
    names = {name for name in vars(torch_private) if not name.startswith("_")} - public - functions
    assert names == {
        "COMPILED_PREFIX",
        "FREEING_METHODS",
        "NUMERIC_OF_CPUS",
        "NUMERIC_OF_CUDA",
        "NUMERIC_OF_ELEMENTS",
        "NUMERIC_OF_HIP",
        "OBSERVING_MODES",
        "SCRIPT_FAILURE",  # checked in tests/contract/rerun/test_keywords.py
        "any_autocast_enabled",
        "apply_code",
        "below_autograd",
        "current_graph_exec_group",
        "current_graph_task_id",
        "dispatch_mode_at",
        "exchange_api",
        "fake_tensor_type",
        "flags_of_cpus",
        "flags_of_cuda",
        "flags_of_elements",
        "flags_of_hip",
        "get_precision",
        "innermost_transform",
        "is_zero_tangent",
        "function_node_type",
        "keeps_graph",
        "must_be_deterministic",
        "next_sequence_number",
        "nondeterminism_warns",
        "num_dispatch_modes",
        "num_function_modes",
        "older_precisions",
        "pop_dispatch_mode",
        "pop_hooks",
        "push_dispatch_mode",
        "push_hooks",
        "python_flags",
        "queue_callback",
        "set_deterministic",
        "set_grad_enabled",
        "set_precision",
        "set_tangents_enabled",
        "top_hooks",
    }, "add the new name to NAMES above"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Return a function that takes one optional name away until the end of the test."""

    def take_away(name: str, connected: str) -> None:
        monkeypatch.setattr(torch_private, name, None)
        _C.connect(_bind.NAMES | {connected: None})

    yield take_away
    monkeypatch.undo()
    _C.connect(_bind.NAMES)


@pytest.fixture
def without_top_hooks(without: Callable[[str, str], None]) -> None:
    without("top_hooks", "top_hooks")


def _program(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.GELU())
    x, m = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)

    def outer(x: torch.Tensor, *, m: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x, *, m: model(x * m).exp(), x.sin(), m=m.cos())
        return checkpoint(model, x).tanh()

    y = checkpoint(outer, x.sin(), m=m.sin()).sum()
    first = torch.autograd.grad(y, [x, m, *model.parameters()], retain_graph=True)
    return [y.detach(), *first, *torch.autograd.grad(y, [x, m, *model.parameters()])]


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _assert_program_is_bit_equal() -> None:
    for actual, expected in zip(_program(actckpt.checkpoint), _program(_plain), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.usefixtures("without_top_hooks")
def test_without_top_hooks_nested_regions_are_bit_equal() -> None:
    _assert_program_is_bit_equal()


@pytest.mark.usefixtures("without_top_hooks")
def test_without_top_hooks_inputs_go_through_outer_hooks() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        packed.append(tensor.shape)
        return (tensor.clone(),)

    x = torch.randn(3, requires_grad=True)
    m = torch.randn(3, 1)
    with saved_tensors_hooks(pack, lambda held: held[0]):
        y = actckpt.checkpoint(lambda x, *, m: (x * m).exp(), x, m=m)
    assert packed == [x.shape, m.shape]
    expected = torch.autograd.grad((x * m).exp().sum(), x)[0]
    m.add_(1)  # the outer hooks packed a copy
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.usefixtures("without_top_hooks")
def test_without_top_hooks_save_on_cpu_outside_is_bit_equal() -> None:
    with save_on_cpu():
        _assert_program_is_bit_equal()


@pytest.mark.usefixtures("without_top_hooks")
def test_without_top_hooks_an_outer_region_still_frees_inner_inputs() -> None:
    storages: list[weakref.ref[Any]] = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        middle = x.sin()
        storages.append(weakref.ref(middle.untyped_storage()))
        return actckpt.checkpoint(lambda x: x.exp(), middle).sum()

    y = actckpt.checkpoint(outer, torch.randn(3, requires_grad=True))
    gc.collect()
    assert storages[0]() is None
    y.backward()


@pytest.mark.usefixtures("without_top_hooks")
def test_without_top_hooks_changed_inputs_still_raise() -> None:
    x, m = torch.randn(3, requires_grad=True), torch.randn(3)
    y = actckpt.checkpoint(lambda x, *, m: (x * m).exp(), x, m=m)
    m.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_queue_callback_values_stay_until_the_graph_goes(without: Callable[[str, str], None]) -> None:
    without("queue_callback", "queue_callback")
    _assert_program_is_bit_equal()
    storages: list[weakref.ref[Any]] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = w.exp()
        storages[:] = [weakref.ref(a.untyped_storage())]
        return x.sin() * a

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y = actckpt.checkpoint(function, x, w).sum()
    torch.autograd.grad(y, w, retain_graph=True)
    del y
    gc.collect()
    assert storages[0]() is None


def test_without_graph_exec_groups_regions_are_bit_equal(without: Callable[[str, str], None]) -> None:
    without("current_graph_exec_group", "graph_exec_group")
    _assert_program_is_bit_equal()


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


def test_without_sequence_numbers_what_an_autograd_function_made_counts_as_an_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(2 * x.detach().numpy())

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return 2 * grads[0]

    x = torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(ByNumpy.apply(x).sin().sum(), x)[0]
    operators = []
    for name in ("next_sequence_number", None):
        if name is not None:
            monkeypatch.setattr(torch_private, name, None)
        with actckpt.region() as region:
            y = ByNumpy.apply(x).sin()
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
        operators.append(region.report().rows[0].operator)
        monkeypatch.undo()
    assert operators == ["(input)", "(not recorded)"]
