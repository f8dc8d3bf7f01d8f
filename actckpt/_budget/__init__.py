"""Plans for the blocks of a model: measured costs of a step, and blocks that run as a plan says."""
