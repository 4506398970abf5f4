"""Changes of parameters in 8 bits, in blocks with a scale each; the rounding error goes into the next change."""

from __future__ import annotations

import math

import numpy as np

from jaxpar.parameter_server.messages import Int8Delta

BLOCK = 256


def quantize(x: np.ndarray) -> Int8Delta:
    """Returns a float array in 8 bits: in blocks of 256 numbers, the largest magnitude of a block is 127.

    >>> quantize(np.array([1.0, -0.5], np.float32)).values[0, :2].tolist()
    [127, -64]
    """
    flat = np.asarray(x, np.float32).reshape(-1)
    blocks = math.ceil(flat.size / BLOCK)
    width = min(BLOCK, flat.size)
    padded = np.zeros(blocks * width if blocks else 0, np.float32)
    padded[: flat.size] = flat
    grid = padded.reshape(blocks, width) if blocks else padded.reshape(0, 0)
    scales = (np.abs(grid).max(1) / np.float32(127)) if blocks else np.zeros(0, np.float32)
    safe = np.where(scales > 0, scales, np.float32(1))
    return Int8Delta(np.rint(grid / safe[:, None]).astype(np.int8), scales.astype(np.float32), x.shape)


def dequantize(delta: Int8Delta) -> np.ndarray:
    """Returns the fp32 array that 8 bits stand for."""
    grid = delta.values.astype(np.float32) * delta.scales[:, None]
    return grid.reshape(-1)[: math.prod(delta.shape)].reshape(delta.shape)
