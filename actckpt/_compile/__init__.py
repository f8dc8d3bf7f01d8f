"""torch.compile: what a compiled function runs in place of regions."""
