"""TransformerEngine: bit-identical reruns and offloading around its modules. See docs/te.md.

Importing this imports nothing of TransformerEngine. Once somebody loads it, `actckpt.checkpoint`, `apply` and
`offload` carry its state by themselves; `checkpoint` here takes the arguments of TransformerEngine's function, and
`wrap` chooses per module and makes backward through its modules repeatable.
"""

from actckpt.te.checkpointing import checkpoint
from actckpt.te.registration import await_te, ignore
from actckpt.te.wrapping import unwrap, wrap

__all__ = ["checkpoint", "ignore", "unwrap", "wrap"]

await_te()
