"""Calls that type checkers must report, each line that ends in `# wrong`, and no other line. Never run."""

import torch

import actckpt
from actckpt.policies import PerOp


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@actckpt.checkpoint()
def checkpointed(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x * scale


@actckpt.region()
def in_region(x: torch.Tensor) -> torch.Tensor:
    return x


@actckpt.offload()
def offloaded(x: torch.Tensor) -> torch.Tensor:
    return x


def results_and_signatures(x: torch.Tensor) -> None:
    number: int = actckpt.checkpoint(double, x)  # wrong
    again: int = actckpt.te.checkpoint(double, x)  # wrong
    checkpointed(x)  # wrong
    checkpointed(x, scale="2")  # wrong
    in_region(x, 1)  # wrong
    offloaded("x")  # wrong
    print(number, again)


def policies(x: torch.Tensor) -> None:
    actckpt.region("recomptue")  # wrong
    actckpt.region("atention")  # wrong
    actckpt.region(3)  # wrong
    actckpt.region({"layers.*::aten.mm": "kep"})  # wrong
    actckpt.region({"layers.*::aten.mm": 3})  # wrong
    actckpt.region([torch.mm])  # wrong
    actckpt.region(lambda info: "kep" if info.is_input else "keep")  # wrong
    actckpt.region(lambda info: 3 if info.is_inputt else 4)  # wrong
    actckpt.checkpoint(double, x, policy="recomptue")  # wrong
    actckpt.checkpoint(policy="ofload")  # wrong
    actckpt.checkpoint(early_stopp=True)  # wrong
    actckpt.checkpoint(double, x, early_stop="yes")  # wrong
    actckpt.checkpoint_sequential([double], 1, x, policy="recomptue")  # wrong
    actckpt.checkpoint_sequential([double], 1, x, early_stopp=False)  # wrong
    PerOp({torch.ops.aten.mm: "ofload"})  # wrong
    PerOp({torch.ops.aten.mm: "attention"})  # wrong
    PerOp({torch.ops.aten.mm: "offload"}, default="recomptue")  # wrong


def places() -> None:
    actckpt.offload("hots")  # wrong
    actckpt.offload(to="cpu")  # wrong
    actckpt.offload(min_bytes=1.5)  # wrong
    actckpt.offload(minbytes=1)  # wrong


def models(model: torch.nn.Module) -> None:
    actckpt.apply(model, "recomptue")  # wrong
    actckpt.apply(model, policy="ofload", min_bytes=4096)  # wrong
    actckpt.apply(model, "offload", to="hots")  # wrong
    actckpt.apply(model, "recompute", early_stopp=False)  # wrong
    actckpt.apply(model, blocks=3)  # wrong
    actckpt.apply(model, budgt="70GiB")  # wrong
    actckpt.apply(model, budget=[1])  # wrong
    actckpt.plan(model=model, budget="70GiB")  # wrong
    actckpt.plan(lambda: None, model=model, budgt="70GiB")  # wrong
    actckpt.apply(model, blocks=[3])  # wrong
    actckpt.apply(model, blocks=torch.Tensor)  # wrong
    actckpt.apply(double)  # wrong
    actckpt.report(model, group_by="modules")  # wrong
    actckpt.report(model, "module")  # wrong
    actckpt.te.wrap(model, "recomptue")  # wrong
    actckpt.te.wrap(model, {"self_attention": "prefer_offload"})  # wrong


def settings() -> None:
    actckpt.configure(audit="allways")  # wrong
    actckpt.configure(host_limitt=1)  # wrong
    actckpt.configure(host_limit=1.5)  # wrong
    actckpt.configure(opaque="aten.mul")  # wrong
    actckpt.configure(fix_malloc="no")  # wrong
    print(actckpt.stats().offloaded_bites)  # wrong
