"""A loop over a stage's layers reads its buffers inside the loop, also if the stage has a single layer."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.analysis.hlo.parser import parse
from jaxpar.parallel.pipeline.executor.stage import read, read_unchanged

SLOTS, WIDTH = 4, 8


def summed(reader: Any, buffer: jax.Array, slot: jax.Array, times: jax.Array) -> jax.Array:
    """The slots of all layers, added in a loop."""
    add = lambda i, total: total + reader([buffer], slot, i)[0]
    return jax.lax.fori_loop(0, times, add, jnp.zeros(WIDTH))


def slices_outside_loops(reader: Any, *arguments: jax.Array) -> int:
    """How many dynamic slices the compiled program has outside of its loop."""
    program = parse(jax.jit(lambda *x: summed(reader, *x)).lower(*arguments).compile().as_text())
    reached, opcodes = [program.entry], []
    for name in reached:  # grows while it is read
        for instruction in program.computations[name].instructions.values():
            opcodes.append(instruction.opcode)
            if instruction.opcode != "while":
                reached += re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", instruction.attributes)
    assert "while" in opcodes
    return opcodes.count("dynamic-slice")


@pytest.mark.parametrize("of_layers", [False, True], ids=["one slot", "a slot of each layer"])
def test_the_slice_of_a_single_layer_is_not_hoisted(of_layers: bool) -> None:
    buffer = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, 1, WIDTH)), jnp.float32)
    slot, times = jnp.asarray([2] if of_layers else 2), jnp.asarray(1)
    np.testing.assert_array_equal(summed(read_unchanged, buffer, slot, times), buffer[2, 0])
    assert slices_outside_loops(read_unchanged, buffer, slot, times) == 0
    if not of_layers:
        assert slices_outside_loops(read, buffer, slot, times) == 1, "a slice at a fixed place is hoisted"


@pytest.mark.parametrize("layers", [2, 3])
def test_several_layers_are_read_one_after_the_other(layers: int) -> None:
    buffer = jnp.asarray(np.random.default_rng(1).normal(size=(SLOTS, layers, WIDTH)), jnp.float32)
    found = summed(read_unchanged, buffer, jnp.asarray(3), jnp.asarray(layers))
    np.testing.assert_allclose(found, np.asarray(buffer[3]).sum(0), rtol=1e-6)
    flat = buffer[:, 0][:, None]  # [slots, 1, width]: each layer has a slot
    found = summed(read_unchanged, flat, jnp.arange(layers), jnp.asarray(layers))
    np.testing.assert_allclose(found, np.asarray(flat[:layers, 0]).sum(0), rtol=1e-6)
