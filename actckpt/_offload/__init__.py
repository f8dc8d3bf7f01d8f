"""Offloading: stores for saved tensors, and the copies to and from them."""
