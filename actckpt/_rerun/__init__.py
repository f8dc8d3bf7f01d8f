"""Rerun: dropped tensors come back by calling the function of their region again."""
