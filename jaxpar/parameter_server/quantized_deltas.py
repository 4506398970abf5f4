"""Changes of parameters in 8 or 4 bits, in blocks with a scale each. The error goes into the sender's next change."""

from __future__ import annotations

import math

import numpy as np

from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.messages import QuantizedDelta

BLOCK = 256


def quantize(x: np.ndarray, bits: DeltaBits) -> QuantizedDelta:
    """Returns a float array in 8 or 4 bits: the largest magnitude of a block of 256 numbers is 127, or 7.

    >>> quantize(np.array([1.0, -0.5], np.float32), 8).values[0, :2].tolist()
    [127, -64]
    """
    flat = np.asarray(x, np.float32).reshape(-1)
    blocks, width = math.ceil(flat.size / BLOCK), min(BLOCK, flat.size)
    width += width % 2 if bits == 4 else 0  # two numbers in a byte
    padded = np.zeros(blocks * width, np.float32)
    padded[: flat.size] = flat
    grid = padded.reshape(blocks, width)
    largest = np.float32(2 ** (bits - 1) - 1)
    scales = np.abs(grid).max(1, initial=0) / largest
    safe = np.where(scales > 0, scales, np.float32(1))
    values = np.rint(grid / safe[:, None]).astype(np.int8)
    if bits == 4:
        values = (values[:, ::2] & 15) | (values[:, 1::2] << 4)
    return QuantizedDelta(values, scales.astype(np.float32), x.shape, bits)


def dequantize(delta: QuantizedDelta) -> np.ndarray:
    """Returns the fp32 array that the bits stand for."""
    values = delta.values
    if delta.bits == 4:  # shifts of int8 keep the sign
        values = np.stack([(values << 4) >> 4, values >> 4], -1).reshape(len(values), 2 * values.shape[1])
    grid = values.astype(np.float32) * delta.scales[:, None]
    return grid.reshape(-1)[: math.prod(delta.shape)].reshape(delta.shape)


def add(value: np.ndarray, delta: QuantizedDelta) -> np.ndarray:
    """Returns a value after a change, in the value's dtype; equal bit by bit wherever it is computed."""
    return (value.astype(np.float32) + dequantize(delta)).astype(value.dtype)
