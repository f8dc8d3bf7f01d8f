"""`estimate`: bytes of a step that is not run are those of one that is, and it leaves everything as it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import operator
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_equal, gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

import actckpt
from actckpt.demo import LanguageModel
from actckpt.memory import LiveStorages

Step = Callable[[], object]
_benchmark: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/estimate.py"))
MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = _benchmark["models"](1)
POLICIES: dict[str, Any] = _benchmark["POLICIES"]


@pytest.mark.parametrize("name", MODELS)
def test_estimated_bytes_are_measured_bytes(name: str) -> None:
    rows = _benchmark["compare_bytes"](MODELS[name])
    assert [row["policy"] for row in rows] == ["none", "recompute", "keep matmuls"]
    for row in rows:
        assert row["estimated_held_bytes"] == pytest.approx(row["measured_held_bytes"], rel=0.01), row["policy"]
        assert row["estimated_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.05), row["policy"]
    none, recompute, keep = (row["estimated_peak_bytes"] for row in rows)
    assert recompute < keep < none


def test_all_bytes_are_those_of_parameters_gradients_optimizer_and_activations() -> None:
    model, step = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def update() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    found = actckpt.estimate(update, model=model, policies={}, target="cpu", optimizer=optimizer)
    update()  # makes the state
    with LiveStorages() as live:
        update()
    parameters = sum(each.nbytes for each in model.parameters())
    state = sum(each.nbytes for entry in optimizer.state.values() for each in entry.values())
    buffers = sum(each.nbytes for each in model.buffers())
    assert found.model_bytes == parameters + buffers
    assert found.gradient_bytes == parameters
    assert found.optimizer_bytes == state
    assert found.rows[0].total_peak_bytes == pytest.approx(parameters + buffers + state + live.peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["llama", "transformer"])
def test_a_plan_for_a_budget_is_within_it_and_costs_less_than_recomputing_everything(name: str) -> None:
    model, step = MODELS[name]()
    policies = {"recompute": "recompute", "60 %": {"activation_budget": "60%"}, "all": {"activation_budget": "100%"}}
    found = actckpt.estimate(step, model=model, policies=policies, target="cpu")
    none, recompute, planned, everything = found.rows
    assert 0.5 * none.peak_bytes < planned.peak_bytes <= 0.6 * 1.01 * none.peak_bytes
    assert 0 < planned.recompute_seconds < recompute.recompute_seconds
    assert (everything.peak_bytes, everything.seconds) == (none.peak_bytes, none.seconds)


def test_a_budget_for_all_memory_counts_parameters_and_state_and_shares_are_of_the_target() -> None:
    model, step = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters())

    def estimated(**options: Any) -> actckpt.Estimate:
        return actckpt.estimate(step, model=model, optimizer=optimizer, **options)

    none, recompute = (row.total_peak_bytes for row in estimated(policies={"recompute": "recompute"}).rows)
    budget = (none + recompute) // 2
    target = dataclasses.replace(actckpt.Target.named("h200"), name="small", memory_bytes=2 * budget)
    found = estimated(policies={"bytes": {"budget": budget}, "share": {"budget": "50%"}}, target=target)
    assert 0.95 * budget < found["bytes"].total_peak_bytes <= budget
    assert dataclasses.replace(found["share"], name="bytes") == found["bytes"]


def test_other_threads_keep_their_clock_and_memory_while_a_budget_is_estimated() -> None:
    model, step = MODELS["llama"]()
    measured: list[int] = []

    def measure() -> None:
        with LiveStorages() as live:
            torch.ones(1024)
        measured.append(live.peak_bytes)

    def measures_beside() -> None:
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
        step()

    actckpt.estimate(measures_beside, model=model, policies={"60 %": {"activation_budget": "60%"}})
    assert len(measured) > 3 and set(measured) == {4096}


@pytest.mark.parametrize("policy", [None, "recompute"])
def test_the_largest_batch_that_fits_is_the_true_one(policy: str | None) -> None:
    found = _benchmark["compare_batches"](limit_bytes=16 << 20, policy=policy)
    assert found["true"] > 5
    assert found["estimated"] == pytest.approx(found["true"], rel=0.05)


def _objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what a model and its optimizer hold, by names that they have for it."""
    parts = [part for module in model.modules() for part in (vars(module), module._parameters, module._buffers)]
    parts += [vars(optimizer), optimizer.state, *optimizer.param_groups]
    return [*itertools.chain.from_iterable(item for part in parts for item in part.items()), *gradients(model)]


def _tensors(model: nn.Module) -> list[Tensor | None]:
    return [*model.state_dict().values(), *gradients(model)]


@pytest.mark.parametrize("fails", [False, True])
def test_model_gradients_optimizer_and_random_state_stay_as_they_were(fails: bool) -> None:
    model, step = MODELS["unet"]()
    optimizer = torch.optim.AdamW(model.parameters())
    step()
    optimizer.step()
    random, dtype = torch.get_rng_state(), torch.get_default_dtype()
    log: list[int] = []
    model.log = log  # type: ignore[assignment]
    objects, values = _objects(model, optimizer), copy.deepcopy(_tensors(model))

    def changes_everything() -> None:
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        model.log.append(1)  # type: ignore[operator]
        model.cached = torch.ones(3)
        optimizer.zero_grad()
        step()
        optimizer.step()
        if fails and len(log) > 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        actckpt.estimate(changes_everything, model=model, optimizer=optimizer)
    now = _objects(model, optimizer)
    assert len(now) == len(objects) and all(map(operator.is_, now, objects))
    assert log == [] and not hasattr(model, "cached")
    assert torch.equal(torch.get_rng_state(), random) and torch.get_default_dtype() is dtype
    assert_equal(_tensors(model), values)
    assert torch.ones(2).cpu().device.type == "cpu" and torch.ones(2).sum().item() == 2


def test_a_model_on_the_meta_device_and_one_for_a_gpu_are_estimated() -> None:
    with torch.device("meta"):
        model = LanguageModel(layers=2, dim=64, heads=4, kv_heads=2, seq=64, dropout=0.1)

    def step() -> None:
        tokens = torch.randint(0, 256, (2, 64), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model.to("cuda")(tokens.cuda(non_blocking=True))
        logits.float().sum().backward()

    found = actckpt.estimate(step, model=model, target="h200")
    assert [row.name for row in found.rows] == ["none", "recompute", "keep matmuls", "offload"]
    assert found.rows[0].peak_bytes > 0 and found.notes == ()
    assert next(model.parameters()).is_meta


def test_kernels_of_the_target_stand_where_the_cpu_has_none() -> None:
    block = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    model, x = nn.Sequential(block, copy.deepcopy(block)), torch.empty(2, 256, 64)
    step = lambda: model(x).sum().backward()  # noqa: E731
    found = {name: actckpt.estimate(step, model=model, policies={}, target=name).rows[0] for name in ("cpu", "h100")}
    scores = 2 * 2 * 4 * 256 * 256 * 4  # of both blocks, one matrix per head
    assert found["cpu"].held_bytes > scores  # with dropout, CPUs compute all of them
    assert found["h100"].held_bytes < scores


def test_attention_that_no_fused_kernel_takes_is_named() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x)
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)

    model = nn.Sequential(Biased(), Biased())
    found = actckpt.estimate(lambda: model(torch.ones(2, 2, 8, 16)).sum().backward(), model=model, policies={})
    assert "2 calls of attention ran as products and a softmax" in found.table()


def test_offloading_lets_go_of_what_a_fast_link_takes_away() -> None:
    with torch.device("meta"):
        block = lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))  # noqa: E731
        model, x = nn.Sequential(*(block() for _ in range(24))), torch.empty(4096, 1024)
    found, slow = (
        actckpt.estimate(
            lambda: model(x).sum().backward(),
            model=model,
            policies={"offload": "offload"},
            target=actckpt.Target("mine", 1e14, 1e13, 1e12, link_bytes_per_s, 10**12),
        )
        for link_bytes_per_s in (1e12, 1e9)
    )
    assert found["offload"].held_bytes < 0.1 * found["none"].held_bytes
    assert found["offload"].peak_bytes < 0.3 * found["none"].peak_bytes
    assert found["offload"].flops == found["none"].flops
    assert found["offload"].seconds < 1.1 * found["none"].seconds
    assert slow["offload"].seconds == pytest.approx(2 * found["none"].held_bytes / 1e9, rel=0.1)
    assert slow["offload"].held_bytes < 0.1 * found["none"].held_bytes + (256 << 20)


class SavesRow(nn.Module):
    """Saves a small view of a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(256))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x + self.offset)[:1].sin().sum()


def test_views_smaller_than_min_bytes_stay() -> None:
    model, x = nn.Sequential(*(SavesRow() for _ in range(8))), torch.randn(1024, 256)
    options = {"policy": "offload", "min_bytes": "1MiB", "blocks": SavesRow}
    target = actckpt.Target("mine", 1e14, 1e13, 1e12, 1e12, 10**12)
    found = actckpt.estimate(lambda: model(x).sum().backward(), model=model, policies={"a": options}, target=target)
    assert found["a"].held_bytes == found["none"].held_bytes > 8 << 20


def test_recomputation_is_told_apart() -> None:
    model, step = MODELS["llama"]()
    found = actckpt.estimate(step, model=model, policies=POLICIES)
    plain, rerun, keep = found.rows
    assert plain.recompute_seconds == 0 and plain.seconds > 0
    assert rerun.seconds == pytest.approx(plain.seconds + rerun.recompute_seconds)
    assert rerun.recompute_seconds > keep.recompute_seconds > 0
    assert rerun.flops <= 4 / 3 * plain.flops  # one forward more, and no audit
    assert rerun.flops > keep.flops == plain.flops  # what costs floating-point operations is kept


def test_policies_and_plans_are_estimated_as_they_are_measured() -> None:
    model, step = MODELS["llama"]()
    plan = actckpt.plan(step, model=model, activation_budget="60%", race=False)

    def torchs(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    policies = {
        "torch": torchs,
        "value": lambda info: "keep" if info.op is torch.ops.aten.mm.default else "recompute",
        "list": ["aten.mm"],
        "table": {"**::aten.mm": "keep"},
        "PerOp": actckpt.policies.PerOp({"aten.mm": "keep"}),
        "plan": plan,
    }
    found = actckpt.estimate(step, model=model, policies=policies, target="cpu")
    measured = actckpt.compare(step, model=model, policies=policies, rounds=1)
    for row in found.rows[:-1]:
        expected = measured[row.name]
        assert (row.held_bytes, row.peak_bytes) == (expected.held_bytes, expected.peak_bytes), row.name
    assert found["plan"].peak_bytes == pytest.approx(measured["plan"].peak_bytes, rel=0.05)
    assert found["plan"].peak_bytes < found["none"].peak_bytes
    assert found["list"].held_bytes < found["none"].held_bytes


def test_a_policy_that_names_operators_of_the_target_means_what_stands_for_them() -> None:
    model, step = MODELS["llama"]()
    names = ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"]
    found = actckpt.estimate(step, model=model, policies={name: [f"aten.{name}"] for name in names})
    theirs, ours = found.rows[1:]
    assert theirs.held_bytes == ours.held_bytes > 0 and theirs.flops == ours.flops


_LAYERS = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
_X = torch.ones(2, 8)


def _backward() -> None:
    _LAYERS(_X).sum().backward()


def _masked() -> None:
    y = _LAYERS(_X)
    y[y > 0].sum().backward()


def _with_optimizer() -> None:
    _backward()
    torch.optim.SGD(_OUTSIDE, lr=0.1).step()


_OUTSIDE = [nn.Parameter(torch.ones(2))]
_SINGLE = r"offloads single values\. .*measure it with actckpt\.compare"


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (
            lambda: _LAYERS(_X),
            {},
            "the step left no gradients in the .* Pass one that runs forward and backward of this",
        ),
        (
            lambda: _LAYERS(_X).sum().item(),
            {},
            r"aten._local_scalar_dense.default in the step \(.*test_estimation.py:\d+\) needs the numbers",
        ),
        (lambda: _LAYERS(_X).tolist(), {}, r"needs the numbers of a tensor"),
        (_masked, {}, r"aten.nonzero.default in the step \(.*test_estimation.py:\d+\) needs the numbers of a tensor"),
        (lambda x: x, {}, "the step is a function that takes arguments"),
        (_backward, {"target": "h10"}, "target='h10' is not known. Pass one of h100, .* Did you mean 'h100'"),
        *(
            (_backward, {"policies": {"mine": policy}}, rf"^estimate: policies\['mine'\] {message}")
            for policy, message in [
                *((policy, _SINGLE) for policy in ({"aten.mm": "offload"}, "prefer_offload", lambda info: "offload")),
                ({"policy": None, "offload_inputs": True}, "has offload_inputs, which moves"),
            ]
        ),
        (_backward, {"policies": {"mine": {"policy": "recompute", "min_bytes": 1}}}, "unknown option min_bytes for"),
        (_backward, {"policies": {"mine": {"activation_budget": "40"}}}, r"^activation_budget='40' has no unit\."),
        (_with_optimizer, {}, r"runs an optimizer \(SGD\) that was not given. Pass it: optimizer="),
    ],
)
def test_a_mistake_is_one_clear_line(step: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        actckpt.estimate(step, model=_LAYERS, **options)
    assert "\n" not in str(raised.value)
    assert type(_LAYERS[0][0].weight) is nn.Parameter


def test_the_module_that_needs_numbers_is_named() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Counts()))
    with pytest.raises(ValueError, match=r"in module '1\.1'"):
        actckpt.estimate(lambda: model(torch.ones(2, 4)).sum().backward(), model=model)
