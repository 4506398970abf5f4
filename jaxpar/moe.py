"""Mixture of experts: routers, their losses, and how rows reach their experts; :func:`jaxpar.experts` runs them."""

from jaxpar.parallel.experts.balance import expert_counts, load_balance_loss, router_z_loss
from jaxpar.parallel.experts.bias import balanced_bias, bias_loss, update_bias
from jaxpar.parallel.experts.dispatch import swiglu
from jaxpar.parallel.experts.experts_local import experts_local
from jaxpar.parallel.experts.grouped_matmul import grouped_matmul
from jaxpar.parallel.experts.metrics import routing_metrics
from jaxpar.parallel.experts.options import ExpertSizes
from jaxpar.parallel.experts.routing import Router, Routing
from jaxpar.parallel.experts.select import bytes_per_transfer, select_dispatch

__all__ = [
    "ExpertSizes",
    "Router",
    "Routing",
    "balanced_bias",
    "bias_loss",
    "bytes_per_transfer",
    "expert_counts",
    "experts_local",
    "grouped_matmul",
    "load_balance_loss",
    "router_z_loss",
    "routing_metrics",
    "select_dispatch",
    "swiglu",
    "update_bias",
]
