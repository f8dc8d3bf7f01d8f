"""Random state that reruns restore, beyond torch's own generators.

The default generators of the CPU and of every device among a region's inputs, and every `torch.Generator` among them,
are restored automatically. Trackers of random states (`CudaRNGStatesTracker` of TransformerEngine, Megatron and
DeepSpeed), Python's `random` and NumPy's global state are restored once they are registered here, or passed as
`rng_trackers=`.
"""

from actckpt._core.extensions import Tracker
from actckpt._core.random_state import numpy_random, python_random, register_tracker, unregister_tracker

__all__ = ["Tracker", "numpy_random", "python_random", "register_tracker", "unregister_tracker"]
