"""What the user can choose, checked before anything expensive is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DemoSettings"]


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of one demo run.

    Attributes:
        steps: optimizer steps per method.
        layers: transformer blocks.
        dim: width of the residual stream.
        heads: query heads; half as many key and value heads if that is a whole number.
        seq: bytes of text per sequence.
        batch: sequences per step.
        dropout: probability of dropping a value on each residual branch, 0 <= dropout < 1.
        seed: of initialisation, batches and dropout.
        device: "auto" (the GPU where there is one), "cpu", or a GPU as torch names it ("cuda", "cuda:1").
        activation_budget: for a method of its own, which finds a plan: bytes as text, or a share of what training
            without checkpointing needs ("30%"); None: without that method.
        methods: names in the registry of methods; empty means all.
        out: directory for the JSON file and the picture.
        plot: whether to draw the picture.
        json: whether to print the JSON file instead of the table.

    Raises:
        ValueError: a value is out of range, or `dim` cannot be divided among the heads.
    """

    steps: int = 20
    layers: int = 8
    dim: int = 128
    heads: int = 4
    seq: int = 256
    batch: int = 4
    dropout: float = 0.1
    seed: int = 0
    device: str = "auto"
    activation_budget: str | None = None
    methods: tuple[str, ...] = ()
    out: Path = Path("demo-out")
    plot: bool = True
    json: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "dim", "heads", "seq", "batch"):
            if not 1 <= (value := getattr(self, name)) < 2**31:
                raise ValueError(f"--{name} is {value}, but must be at least 1 and below 2**31.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}, but must be at least 0 and below 1; try 0.1.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}, but must be at least 0 and below 2**63.")
        if self.dim % (2 * self.heads) != 0:
            # Rotary embeddings turn pairs of values, so a head's width is even.
            nearest = max(1, round(self.dim / (2 * self.heads))) * 2 * self.heads
            raise ValueError(
                f"--dim is {self.dim}, but must be a multiple of {2 * self.heads}, twice --heads "
                f"{self.heads}; try --dim {nearest}."
            )

    @property
    def kv_heads(self) -> int:
        """Key and value heads; each serves `heads // kv_heads` query heads."""
        return self.heads // 2 if self.heads % 2 == 0 else self.heads
