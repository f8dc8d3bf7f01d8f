"""TransformerEngine: bit-identical reruns and offloading around its modules. See docs/te.md.

Importing this imports nothing of TransformerEngine. Once somebody loads it, `actckpt.checkpoint`, `apply` and
`offload` carry its state by themselves; `checkpoint` here takes the arguments of TransformerEngine's function.
"""

from actckpt.te.checkpoint import checkpoint
from actckpt.te.registration import await_te, ignore

__all__ = ["checkpoint", "ignore"]

await_te()
