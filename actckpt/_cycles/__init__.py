"""Memory budgets from a measured timeline: the memory of training cycles, and the plan that they run."""
