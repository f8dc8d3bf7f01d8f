"""torch.compile: what a compiled function runs instead of regions."""
