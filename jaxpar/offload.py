"""Offload: optimizer state in host memory or on disk, and the weights of stacked layers in host memory."""

from jaxpar.parallel.offload.host_weights import to_device
from jaxpar.parallel.offload.placement import to_disk, to_host
from jaxpar.training.disk_step import disk_offloaded_train_step

__all__ = [
    "disk_offloaded_train_step",
    "to_device",
    "to_disk",
    "to_host",
]
