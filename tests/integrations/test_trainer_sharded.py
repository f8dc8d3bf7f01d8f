"""`apply` before a Trainer whose model is sharded with FSDP, on two ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from training import STEPS
from transformers_models import make
from two_ranks import printed_by_two_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"

#: Trains a Llama that is sharded on two ranks, by FSDP2 and FSDP1, in several ways; the first rank prints losses and
#: bytes. accelerate offers FSDP with GPUs only; all that it and the trainer do for it runs here too.
_PROGRAM = """
import sys
import torch, transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from training import STEPS, held_and_peak
from transformers_models import make
import actckpt

torch.set_num_threads(1)
ids = torch.randint(3, 64, (64, 12), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in ids]
options = {"per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-3, "max_steps": STEPS}
quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "ddp_backend": "gloo"}
wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
wrapping |= {"cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT"}
for version in (2, 1):
    for how in ("plain", "theirs", "ours", "matmuls"):
        model, folder = make("llama"), f"{sys.argv[1]}/{how}{version}"
        model.config.use_cache = False
        if how in ("ours", "matmuls"):
            actckpt.apply(model, **({"policy": "matmuls"} if how == "matmuls" else {}))
        arguments = transformers.TrainingArguments(output_dir=folder, **options, **quiet)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        state = trainer.accelerator.state
        state.device = torch.device("cpu")
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        plugin = {"fsdp_version": version, "activation_checkpointing": how == "theirs"}
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin, **wrapping)
        trainer.is_fsdp_enabled = True
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if version == 2:  # of FSDP1 this fails on CPUs, in torch, also of a plain model
            trainer.save_model(folder)
        sharded = trainer.model_wrapped
        assert "FSDP" in type(sharded).__name__ if version == 2 else "FullySharded" in type(sharded).__name__
        assert how not in ("ours", "matmuls") or len(actckpt.report(sharded).blocks_ran) == 3
        held = held_and_peak(sharded, lambda: sharded(input_ids=ids[:2], labels=ids[:2]).loss)
        if trainer.is_world_process_zero():
            print(repr((version, how, losses, held)), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def _bytes_of(model: Any, folder: Path) -> bytes:
    model.save_pretrained(folder)
    return (folder / "model.safetensors").read_bytes()


def test_a_trainer_that_shards_trains_and_saves_as_plain_and_holds_no_more_than_the_librarys_own(
    tmp_path: Path,
) -> None:
    found = printed_by_two_ranks(_PROGRAM, str(tmp_path))
    losses = {(version, how): each for version, how, each, _ in found}
    held = {(version, how): each for version, how, _, each in found}
    for version, how in itertools.product((2, 1), ("ours", "matmuls")):
        assert losses[version, how] == losses[version, "plain"] and len(losses[version, how]) == STEPS
    for version in (2, 1):
        assert all(ours <= theirs for ours, theirs in zip(held[version, "ours"], held[version, "theirs"], strict=True))
        assert held[version, "theirs"][0] < held[version, "matmuls"][0] < held[version, "plain"][0]
        sizes = (held[version, how] for how in ("plain", "theirs", "ours", "matmuls"))
        cells = " | ".join(f"{held_bytes / 1024:.1f} / {peak_bytes / 1024:.1f}" for held_bytes, peak_bytes in sizes)
        assert f"| FSDP{version} | {cells} |" in _PAGE.read_text(), cells
    plain = (tmp_path / "plain2" / "model.safetensors").read_bytes()
    assert plain != _bytes_of(make("llama"), tmp_path / "untrained")
    assert all((tmp_path / f"{how}2" / "model.safetensors").read_bytes() == plain for how in ("ours", "matmuls"))
    assert _bytes_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours2"), tmp_path / "again") == plain
