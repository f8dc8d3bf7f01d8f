"""The parts of `gpu_run.py`. Each runs in a process of its own: `python -m gpu_parts PART --out DIR`."""
