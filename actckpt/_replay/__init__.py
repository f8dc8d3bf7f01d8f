"""Replay: getting dropped tensors back by executing only the recorded operators that lead to them."""
