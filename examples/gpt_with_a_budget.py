"""Train a small GPT within a memory budget: two lines beside the usual loop.

Run: python examples/gpt_with_a_budget.py
"""

import torch
from torch import nn
from torch.nn import functional

import actckpt

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 65, 64, 64, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    text, model = torch.randint(VOCABULARY, (10_000,)), GPT()  # yours: the tokens of a file
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    actckpt.apply(model, activation_budget="50%", optimizer=optimizer)  # or budget="70GiB", for all memory
    for step in range(20):
        starts = torch.randint(len(text) - CONTEXT, (8,)).tolist()
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        optimizer.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    print(actckpt.report(model))


if __name__ == "__main__":
    main()
