"""Replay: restore dropped tensors by executing only the recorded operators that they depend on."""
