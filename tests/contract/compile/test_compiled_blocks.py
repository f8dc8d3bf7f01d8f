"""Regions and policies around code that was compiled before: no recorder sees its kernels."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heap import allocated_bytes
from oracle import assert_equal, leaf, theirs
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's CPU backend needs g++"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

runs_compiled = pytest.mark.skipif(
    torch.__version__ < (2, 10),
    reason="below a dispatch mode, torch before 2.10 runs compiled functions uncompiled: regions see their operators",
)

WIDTH = 256
ROWS = 1024
BLOCK_BYTES = ROWS * 4 * WIDTH * 4  # of one wide activation: 4 MiB


def _torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, Any] = {
    "name": "recompute",
    "list": ["aten.mm"],
    "torch": _torch_policy,
    "values": lambda info: "recompute",
    "replayable values": lambda info: "recompute" if info.replayable else "keep",
}


@functools.cache
def _compiled_convolutions() -> Any:
    """Return a module in which raw kernels overwrite what operators returned."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    return torch.compile(torch.nn.Sequential(model, torch.nn.ReLU()))


@functools.cache
def _compiled_block() -> Any:
    torch.manual_seed(0)
    wide = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.compile(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), *wide, torch.nn.GELU()))


def _fresh_block() -> Any:
    """Return a module around the compiled block that no site has seen."""
    return torch.nn.Sequential(_compiled_block())


def _gradients(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, module: Any) -> Any:
    torch.manual_seed(3)
    y = call(x * 1.5).square()
    return y.detach(), torch.autograd.grad(y.sum(), [x, *module.parameters()])


def _held_bytes(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Return what a forward leaves behind, as the allocator of the C library counts it."""
    before = allocated_bytes()
    y = call(x)
    held = allocated_bytes() - before
    y.sum().backward()
    return held


@runs_compiled
@pytest.mark.parametrize("audit", ["off", "first"])
@pytest.mark.parametrize("policy", POLICIES)
def test_operators_in_compiled_code_are_not_executed_again(policy: str, audit: str) -> None:
    """A kernel that no dispatcher sees applies ReLU to the memory that the convolution returned."""
    module, x = _compiled_convolutions(), leaf(2, 4, 16, 16)
    expected = _gradients(module, x, module)
    actckpt.configure(audit=audit)  # until the fixture of all tests puts it back
    for _ in range(2):
        assert_equal(_gradients(actckpt.region(POLICIES[policy])(module), x, module), expected)


def test_a_region_around_a_compiled_block_does_what_torchs_selective_checkpoint_does() -> None:
    """Compiled or not, which is torch's to say; ours first, since torch 2.9 then leaves it uncompiled for good."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module: Any = torch.compile(torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Dropout(0.2)))
    x = leaf(2, 4, 16, 16)
    actckpt.configure(audit="first")  # until the fixture of all tests puts it back
    for policy in POLICIES.values():
        results = [_gradients(actckpt.region(policy)(module), x, module) for _ in range(3)]
        contexts = functools.partial(create_selective_checkpoint_contexts, _torch_policy)
        expected = _gradients(lambda x: theirs(module, x, context_fn=contexts), x, module)  # noqa: B023 called here
        for result in results:
            assert_equal(result, expected)
    torch._dynamo.reset()


@runs_compiled
def test_a_policy_around_a_compiled_block_holds_no_more_than_torch_from_the_second_call_on() -> None:
    function, x = _fresh_block(), leaf(ROWS, WIDTH)
    contexts = functools.partial(create_selective_checkpoint_contexts, _torch_policy)
    actckpt.reset_stats()
    with pytest.warns(UserWarning, match=r"made by compiled code.*whole function runs again"):
        actckpt.checkpoint(function, x, policy=["aten.mm"]).sum().backward()
    assert actckpt.stats().kept_opaque > 0
    actckpt.reset_stats()
    ours = min(_held_bytes(lambda x: actckpt.checkpoint(function, x, policy=["aten.mm"]), x) for _ in range(3))
    torchs = min(_held_bytes(lambda x: theirs(function, x, context_fn=contexts), x) for _ in range(3))
    assert ours < torchs + BLOCK_BYTES // 64
    assert actckpt.stats().rerun_regions == 3 and actckpt.stats().kept_opaque == 0


@runs_compiled
@pytest.mark.parametrize("way", ["policy", "context_fn", "apply"])
def test_a_function_that_falls_back_to_a_rerun_gives_the_same_gradients_as_before(way: str) -> None:
    """Random numbers included, also where the caller does not ask for them: replay always restores them."""
    function, module, x = _fresh_block(), _compiled_block(), leaf(ROWS, WIDTH)
    expected = _gradients(module, x, module)
    contexts = functools.partial(create_selective_checkpoint_contexts, _torch_policy)
    call: Any = functools.partial(actckpt.checkpoint, function, policy=["aten.mm"], preserve_rng_state=False)
    if way == "context_fn":
        call = functools.partial(actckpt.checkpoint, function, context_fn=contexts, preserve_rng_state=False)
    elif way == "apply":
        holder = torch.nn.ModuleList([torch.compile(module._orig_mod)])
        actckpt.apply(holder, policy=["aten.mm"], blocks=["0"])
        call = holder[0]
    with pytest.warns(UserWarning, match="made by compiled code"):
        assert_equal(_gradients(call, x, module), expected)
    actckpt.reset_stats()
    for _ in range(2):
        assert_equal(_gradients(call, x, module), expected)
    assert actckpt.stats().rerun_regions == 2
    if way == "apply":
        actckpt.remove(holder)


@runs_compiled
def test_a_function_that_falls_back_takes_a_backward_through_one_of_its_results_after_the_other() -> None:
    module, x = _compiled_block(), leaf(ROWS, WIDTH)

    class Both(torch.nn.Module):
        def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return module(z), z.exp().sin()

    function = Both()
    for call in range(3):
        torch.manual_seed(1)
        if call == 0:
            with pytest.warns(UserWarning, match="made by compiled code"):
                results = actckpt.checkpoint(function, x, policy=["aten.mm"])
        else:
            results = actckpt.checkpoint(function, x, policy=["aten.mm"])
        torch.manual_seed(1)
        for one, plain in reversed(list(zip(results, function(x), strict=True))):
            expected = torch.autograd.grad(plain.sum(), x)
            assert_equal(torch.autograd.grad(one.sum(), x, retain_graph=one is not results[0]), expected)


@runs_compiled
def test_a_checkpoint_inside_of_a_region_falls_back_on_its_own() -> None:
    function, module, x = _fresh_block(), _compiled_block(), leaf(ROWS, WIDTH)
    expected = _gradients(lambda z: module(z.exp()).sin(), x, module)

    def nested(z: torch.Tensor) -> torch.Tensor:
        with actckpt.region():
            return actckpt.checkpoint(function, z.exp(), policy=["aten.mm"]).sin()

    with pytest.warns(UserWarning, match="made by compiled code") as warned:
        assert_equal(_gradients(nested, x, module), expected)
    assert len(warned) == 1
    actckpt.reset_stats()
    assert_equal(_gradients(nested, x, module), expected)
    assert actckpt.stats().rerun_regions == 1 and actckpt.stats().kept_opaque == 1  # its result, which `sin` saves


@runs_compiled
def test_a_region_keeps_what_compiled_code_made_says_so_once_and_counts_it_each_time() -> None:
    module, x = _compiled_block(), leaf(ROWS, WIDTH)

    def step() -> actckpt.regions.Report:
        with actckpt.region() as region:
            y = module(x.exp()).sin()
        y.sum().backward()
        report = region.report()
        assert isinstance(report, actckpt.regions.Report)
        return report

    actckpt.reset_stats()
    with pytest.warns(UserWarning, match=r"MiB that the policy of this region wants to recompute cannot be replayed"):
        step()
    first = actckpt.stats().kept_opaque
    assert first > 0
    report = step()
    assert actckpt.stats().kept_opaque == 2 * first
    (row,) = [row for row in report.rows if row.operator == "(not recorded)"]
    assert row.kept_bytes > BLOCK_BYTES and row.not_replayed == {"made by compiled code": row.num_values}


@runs_compiled
def test_a_policy_may_offload_what_compiled_code_made() -> None:
    module, x = _compiled_block(), leaf(ROWS, WIDTH)
    expected = _gradients(module, x, module)
    seen: list[actckpt.SavedTensorInfo] = []

    def policy(info: actckpt.SavedTensorInfo) -> str:
        seen.append(info)
        return "recompute" if info.replayable else "keep" if info.is_input else "offload"

    for policies in (policy, actckpt.policies.PerOp({"aten.mul": "recompute"}, default="offload")):
        actckpt.reset_stats()
        assert_equal(_gradients(actckpt.region(policies)(module), x, module), expected)
        assert actckpt.stats().offloaded_bytes > BLOCK_BYTES
    assert any(info.nbytes == BLOCK_BYTES and not info.is_input and info.op is None for info in seen)


def test_what_an_autograd_function_makes_by_other_means_is_no_input() -> None:
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return torch.from_numpy(2 * x.detach().cpu().numpy()).to(x.device)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return 2 * grads[0]

    x = leaf(1 << 19)
    before = ByNumpy.apply(x)  # outside: an input
    expected = torch.autograd.grad(ByNumpy.apply(before).sin().sum(), x, retain_graph=True)
    with pytest.warns(UserWarning, match="cannot be replayed"), actckpt.region() as region:
        y = ByNumpy.apply(before).sin()
    assert_equal(torch.autograd.grad(y.sum(), x), expected)
    reasons = {row.operator: row.not_replayed for row in region.report().rows}
    assert reasons["(input)"] == {"an input of the region": 1}
    (reason,) = reasons["(not recorded)"]
    assert reason.startswith("made by ") and reason.endswith("ByNumpy, whose kernels are not recorded")


class _WithCompiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.inner = torch.compile(self._inner, backend="eager")

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


@pytest.mark.filterwarnings("error")
def test_a_budget_profiles_blocks_with_compiled_code_and_the_compiler_traces_none_of_ours() -> None:
    model = torch.nn.Sequential(*(_WithCompiled() for _ in range(3)))
    x = torch.randn(8, 16)
    for block in model:  # what is compiled is compiled before
        block(x).sum().backward()
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    actckpt.apply(model, activation_budget="2GiB", race=False)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        assert_equal([parameter.grad for parameter in model.parameters()], expected)
    plan = actckpt.report(model).plan
    assert plan is not None and any(block.rerun for block in plan.costs.blocks)
