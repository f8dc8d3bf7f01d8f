"""Calls that type checkers must accept, and the types that they must see. Never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import assert_type

import actckpt
from actckpt import Action, Place
from actckpt.policies import PerOp, Policy


def split(x: torch.Tensor, parts: int = 2) -> tuple[torch.Tensor, int]:
    return x, parts


def torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def by_size(info: actckpt.SavedTensorInfo) -> Action:
    return Action.OFFLOAD if info.nbytes > 1 << 20 else Action.KEEP


@actckpt.checkpoint()
def checkpointed(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x * scale


@actckpt.checkpoint(early_stop=False, policy=[torch.ops.aten.mm.default])
def with_options(x: torch.Tensor) -> list[torch.Tensor]:
    return [x]


@actckpt.region("keep")
def in_region(x: torch.Tensor) -> str:
    return str(x)


@actckpt.offload("disk", min_bytes="4KiB")
def offloaded(x: torch.Tensor) -> bytes:
    return bytes(x.numel())


class Layer(torch.nn.Module):
    @actckpt.checkpoint(policy="recompute")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def calls_keep_their_types(x: torch.Tensor) -> None:
    assert_type(actckpt.checkpoint(split, x), tuple[torch.Tensor, int])
    assert_type(actckpt.checkpoint(split, x, parts=3, use_reentrant=False, debug=True), tuple[torch.Tensor, int])
    assert_type(actckpt.te.checkpoint(split, x, debug=True, parts=3), tuple[torch.Tensor, int])
    assert_type(actckpt.checkpoint(torch.nn.Linear(4, 4), x), Any)
    assert_type(checkpointed(x, scale=2.0), torch.Tensor)
    assert_type(with_options(x), list[torch.Tensor])
    assert_type(in_region(x), str)
    assert_type(offloaded(x), bytes)
    assert_type(Layer().forward(x), torch.Tensor)


def policies_of_every_form(model: torch.nn.Module, x: torch.Tensor, policy: Policy, name: str) -> None:
    packets = [torch.ops.aten.mm, torch.ops.aten.addmm]
    sequence: Sequence[str] = ("aten.mm",)
    places = {Place("head", "aten.addmm.default"): Action.KEEP}
    for region in (
        actckpt.region(),
        actckpt.region("prefer_offload"),
        actckpt.region("keep", record=True),
        actckpt.region("attention"),
        actckpt.region("matmuls"),
        actckpt.region("dots_with_no_batch_dims"),
        actckpt.region(Action.KEEP),
        actckpt.region(["aten.mm", torch.ops.aten.mm, torch.ops.aten.mm.default]),
        actckpt.region(packets),
        actckpt.region((torch.ops.aten.mm,)),
        actckpt.region(sequence),
        actckpt.region({torch.ops.aten.mm}),
        actckpt.region([name]),
        actckpt.region(PerOp({torch.ops.aten.mm: "offload", "aten.addmm": Action.KEEP}, default="recompute")),
        actckpt.region({"layers.*::aten.mm": "keep", Place("head", "aten.addmm.default"): Action.OFFLOAD}),
        actckpt.region({name: Action.KEEP}),
        actckpt.region(places),
        actckpt.region(lambda info: Action.KEEP if info.is_input else Action.OFFLOAD),
        actckpt.region(lambda info: "keep" if info.is_input else "offload"),
        actckpt.region(by_size),
        actckpt.region(torch_policy),
        actckpt.region(policy),
    ):
        with region as opened:
            assert_type(actckpt.checkpoint(split, x, policy=policy), tuple[torch.Tensor, int])
        assert_type(opened.report().kept_bytes, int)
    actckpt.checkpoint_sequential([split], 1, x, preserve_rng_state=False, policy=policy)


def models(model: torch.nn.Module, policy: Policy) -> None:
    assert_type(actckpt.apply(model), tuple[str, ...])
    actckpt.apply(model, budget="70GiB", race=False, pins={"qkv": "keep"})
    actckpt.apply(model, activation_budget="40%", blocks="layers.*", optimizer=torch.optim.SGD(model.parameters()))
    plan = actckpt.plan(lambda: None, model=model, budget=0.9)
    assert_type(plan, actckpt.Plan)
    actckpt.apply(model, plan)
    actckpt.apply(model, "offload", min_bytes="1MiB", to="host")
    actckpt.apply(model, Action.OFFLOAD, blocks="layers.*", min_bytes=4096)
    actckpt.apply(model, policy, blocks=torch.nn.Linear)
    actckpt.apply(model, "attention", preserve_rng_state=True)
    actckpt.apply(model, policy=None, blocks=["layers.0", torch.nn.Linear], preserve_rng_state=False)
    actckpt.apply(model, [torch.ops.aten.mm], blocks=lambda module: len(list(module.children())) > 3)
    assert_type(actckpt.report(model).blocks_ran, tuple[str, ...])
    assert_type(actckpt.report(model, group_by="module", top=3).rows[0].kept_bytes, int)
    assert_type(actckpt.remove(model), tuple[str, ...])
    actckpt.te.wrap(model, {"self_attention": "recompute", torch.nn.Linear: "offload"}, retain_graph=True)
    actckpt.te.wrap(model, "keep")


def settings() -> None:
    changed = actckpt.configure(
        host_limit="64GiB", disk_limit=None, spill_dir="/tmp", max_inflight="auto", num_workers=1
    )
    assert_type(changed.host_limit, int | None)
    actckpt.configure(audit="always", opaque=["aten.mul", torch.ops.aten.mm], observers=[])
    assert_type(actckpt.stats().offloaded_bytes, int)
