"""Mixture of experts: routers, their losses, and how rows reach their experts; :func:`jaxpar.experts` runs them."""

from jaxpar.parallel.experts.dispatch import swiglu
from jaxpar.parallel.experts.experts_local import experts_local
from jaxpar.parallel.experts.grouped_matmul import grouped_matmul
from jaxpar.parallel.experts.options import ExpertSizes
from jaxpar.parallel.experts.routing import Router, Routing
from jaxpar.parallel.experts.select import bytes_per_transfer, select_dispatch

__all__ = [
    "ExpertSizes",
    "Router",
    "Routing",
    "bytes_per_transfer",
    "experts_local",
    "grouped_matmul",
    "select_dispatch",
    "swiglu",
]
