"""`apply` before `Accelerator.prepare`: one process, and FSDP2 in two against the library's own checkpointing."""

from __future__ import annotations

import pytest
import torch
from training import STEPS, assert_equal
from transformers_models import batch, make
from two_ranks import printed_by_two_ranks

import actckpt

accelerate = pytest.importorskip("accelerate")

#: Trains a Llama that is sharded on two ranks, in three ways, and prints losses and bytes of the first rank.
_PROGRAM = """
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from training import STEPS, held_and_peak
from transformers_models import batch, make
import actckpt

torch.set_num_threads(1)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(cpu=True)  # which offers FSDP with GPUs only; all that it does for it runs here too
PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin
for how in ("plain", "theirs", "ours"):
    plugin.activation_checkpointing = how == "theirs"
    model = make("llama")
    names = actckpt.apply(model) if how == "ours" else ()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = lambda: model(**batch("llama"), use_cache=False).loss
    torch.manual_seed(2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert accelerator.is_fsdp2 and "FSDP" in type(model).__name__
    assert not names or (len(names) == 3 and actckpt.report(model).blocks_ran == names)
    held = held_and_peak(model, step)
    if accelerator.is_main_process:
        print(repr((losses, held)), flush=True)
accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


def test_apply_before_fsdp2_trains_as_plain_and_holds_no_more_than_the_librarys_own() -> None:
    plain, theirs, ours = printed_by_two_ranks(_PROGRAM)
    assert ours[0] == plain[0] and len(ours[0]) == STEPS
    assert ours[1][0] <= theirs[1][0] < plain[1][0]
    assert ours[1][1] <= theirs[1][1] < plain[1][1]


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_apply_before_prepare_trains_as_plain_also_with_accumulation(policy: str) -> None:
    def run(*, applies: bool) -> list[torch.Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make("llama")
        if applies:
            actckpt.apply(model, policy)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        torch.manual_seed(2)
        losses = []
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                loss = model(**batch("llama"), use_cache=False).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    assert_equal(run(applies=True), run(applies=False))
