"""TransformerEngine's published Python code, run on the CPU without its compiled part.

The wheel `transformer_engine` is pure Python. What it imports from the compiled part, `transformer_engine_torch`, and
the calls that it makes to torch.cuda are emulated here, so that its modules, quantizers, recipes and random state
trackers run as they were published, forward and backward. Nothing of TransformerEngine lies here.

    wheel.py         unpacks the wheel and loads it
    rewriting.py     what is changed in its sources while they are loaded: "cuda" becomes "cpu"
    device.py        what stands in the place of torch.cuda
    generators.py    the device's random state, by pointer as on CUDA
    quantization.py  FP8 casts and updates of scales
    kernels.py       products, norms, activations, softmax
    extension.py     the module that all of this makes up
    training.py      the training runs that tests compare

How exact numbers are does not matter; that they are the same each time does. Kernels are as an extension's are: modes,
autograd and version counters see nothing of them. What cannot be seen here: real kernels (whether they are
deterministic, what they alias), fused attention, streams, pinned memory, CUDA graphs, several ranks, MXFP8 and NVFP4.

`make te` runs the tests in an environment of their own.
"""
