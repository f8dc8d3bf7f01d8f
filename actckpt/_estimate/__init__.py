"""Steps on fake tensors: the memory and time that they would need on another device."""
