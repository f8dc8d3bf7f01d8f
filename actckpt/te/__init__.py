"""TransformerEngine: bit-identical reruns and offloading around its modules. See docs/te.md.

Importing this package does not import TransformerEngine. Once it is loaded, `actckpt.checkpoint`, `apply` and `offload`
carry its state automatically. `checkpoint` here takes the arguments of TransformerEngine's function. `wrap` sets a
policy per module and makes backward through its modules repeatable.
"""

from actckpt.te.checkpointing import checkpoint
from actckpt.te.registration import await_te, ignore
from actckpt.te.wrapping import unwrap, wrap

__all__ = ["checkpoint", "ignore", "unwrap", "wrap"]

await_te()
