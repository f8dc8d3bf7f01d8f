"""Give Transformers' `Trainer` a memory budget: one callback.

Needs transformers and accelerate. Run: python examples/transformers_trainer.py
"""

import tempfile

import torch
import transformers

import actckpt
from actckpt.integrations.transformers import callback


def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_attention_heads=4, num_hidden_layers=4
    )
    model = transformers.LlamaForCausalLM(config)  # yours: from_pretrained(...)
    tokens = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 32))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=12, logging_steps=4, use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=tokens,
            callbacks=[callback(activation_budget="60%")],  # or budget="70GiB", policy="matmuls", nothing
        )
        trainer.train()
    print(actckpt.report(model))  # of the last step


if __name__ == "__main__":
    main()
