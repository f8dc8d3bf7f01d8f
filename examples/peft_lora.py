"""Train LoRA adapters of PEFT on a frozen, checkpointed model: the losses of plain training, less memory.

Needs transformers and peft. Run: python examples/peft_lora.py
"""

import peft
import torch
import transformers

import actckpt
from actckpt.memory import measure_step


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=4,
        use_cache=False,
    )
    base = transformers.LlamaForCausalLM(config)  # yours: from_pretrained(...), also in 4 bits
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def train(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[list[float], float]:
    """Return the losses of five steps, and the peak of activation bytes of one more in MiB."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    peak_bytes = measure_step(
        lambda: model(input_ids=tokens, labels=tokens).loss.backward(), device="cpu", parameters=model.parameters()
    ).peak_bytes
    return losses, peak_bytes / 2**20


def main() -> None:
    tokens = torch.randint(0, 64, (8, 32))
    plain_losses, plain_mib = train(make(), tokens)
    model = make()
    actckpt.apply(model)  # or policy="matmuls", or a budget
    losses, mib = train(model, tokens)
    print(f"plain    last loss {plain_losses[-1]:.9f}, peak {plain_mib:.1f} MiB")
    print(f"actckpt  last loss {losses[-1]:.9f}, peak {mib:.1f} MiB")
    assert losses == plain_losses


if __name__ == "__main__":
    main()
