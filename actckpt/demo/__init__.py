"""The main job: train one small language model with every method and compare time, memory and bits."""
