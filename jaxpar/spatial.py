"""Sliced images and volumes: convolutions, pooling and resizing whose height, width or depth is sharded."""

from jaxpar.parallel.spatial.conv import conv_local
from jaxpar.parallel.spatial.halo import Window, exchange_halo
from jaxpar.parallel.spatial.layers import ConvTranspose, intercept_conv_transpose, use_slices
from jaxpar.parallel.spatial.pool import reduce_window_local
from jaxpar.parallel.spatial.read import open_image, read_slices
from jaxpar.parallel.spatial.resize import Resizing, resize_local
from jaxpar.parallel.spatial.slices import avg_pool, conv, conv_transpose, max_pool, resize

__all__ = [
    "ConvTranspose",
    "Resizing",
    "Window",
    "avg_pool",
    "conv",
    "conv_local",
    "conv_transpose",
    "exchange_halo",
    "intercept_conv_transpose",
    "max_pool",
    "open_image",
    "read_slices",
    "reduce_window_local",
    "resize",
    "resize_local",
    "use_slices",
]
