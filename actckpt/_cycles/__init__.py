"""Budgets from a measured timeline: what cycles of training need, and the plan that they run."""
