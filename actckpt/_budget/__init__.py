"""Plans for the blocks of a model: what a step costs, measured, and blocks that run as a plan says."""
