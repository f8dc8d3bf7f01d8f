"""Rerun: restore dropped tensors by calling the region's function again."""
