"""Sliced images and volumes: convolutions, pooling and resizing whose height, width or depth is sharded."""

from jaxpar.parallel.spatial.conv import conv_local
from jaxpar.parallel.spatial.halo import Window, exchange_halo
from jaxpar.parallel.spatial.pool import reduce_window_local
from jaxpar.parallel.spatial.resize import Resizing, resize_local
from jaxpar.parallel.spatial.slices import avg_pool, conv, max_pool, resize

__all__ = [
    "Resizing",
    "Window",
    "avg_pool",
    "conv",
    "conv_local",
    "exchange_halo",
    "max_pool",
    "reduce_window_local",
    "resize",
    "resize_local",
]
