"""Context parallelism: how attention over a sharded sequence runs, what it costs, and how tokens are balanced."""

from jaxpar.parallel.attention.attention_local import attention_local
from jaxpar.parallel.attention.context import Context
from jaxpar.parallel.attention.cost_model import QKVSharding
from jaxpar.parallel.attention.flax_attention import FlaxAttention
from jaxpar.parallel.attention.load_balance import balance
from jaxpar.parallel.attention.packing import balanced_packing
from jaxpar.parallel.attention.plot import draw_mask
from jaxpar.parallel.attention.select import bytes_sent, select_impl
from jaxpar.parallel.collectives.hierarchical import all_to_all_local

__all__ = [
    "Context",
    "FlaxAttention",
    "QKVSharding",
    "all_to_all_local",
    "attention_local",
    "balance",
    "balanced_packing",
    "bytes_sent",
    "draw_mask",
    "select_impl",
]
