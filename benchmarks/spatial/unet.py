"""A U-Net on images of 8,192 × 8,192 × 8, compiled for 16 v5e chips: unsliced it does not fit, in 4 × 4 slices it does.

    uv run python benchmarks/spatial/unet.py [--size 8192]

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Unsliced, each chip has an image of its own;
sliced, all chips share one. Wire bytes by hand are the least that the forward and the backward pass send: of each
convolution the halo of its input, the halo of the gradient of its input, and the halo again where the backward pass
computes it again; and the sum of the gradients of all kernels.

Goals: unsliced the compiler refuses the program for its size; sliced it fits, and sends at most 1.1 times the bytes by
hand. Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime
from jaxpar.errors import CompileError
from jaxpar.models import segmentation_loss
from jaxpar.models.unet import UNetConfig, make_unet

TOPOLOGY, CHIPS, SIDE = "v5e:4x4", 16, 4
MIB = 2**20
RULES = {"batch": "data", "height": "context", "width": "ulysses", "channels": None}


def config() -> UNetConfig:
    """Return the model: four levels of 16 to 128 channels in bf16, each block computed again."""
    return UNetConfig(in_channels=8, channels=16, levels=4, dtype="bfloat16", remat=True)


def compile_unet(size: int, *, sliced: bool) -> AheadOfTime:
    """Return the compiled train step on images [batch, size, size, 8]; raises CompileError if it does not fit."""
    mesh = jp.MeshSpec(context=SIDE, ulysses=SIDE) if sliced else jp.MeshSpec(data=CHIPS)
    layout = jp.Layout(mesh.on(TOPOLOGY), jp.Rules(**RULES))
    c = config()
    images = 1 if sliced else CHIPS
    dims = ("batch", "height", "width")
    batch = {
        "image": jp.tag(jax.ShapeDtypeStruct((images, size, size, c.in_channels), jnp.bfloat16), *dims, None),
        "label": jp.tag(jax.ShapeDtypeStruct((images, size, size), jnp.int32), *dims),
    }
    make_model = lambda key: make_unet(key, in_channels=8, channels=16, levels=4, dtype="bfloat16", remat=True)
    return jp.analysis.compile_for(TOPOLOGY, layout, make_model, optax.adamw(1e-3), segmentation_loss, batch)


def halo(size: int, channels: int) -> int:
    """Return the bf16 bytes that a chip inside the grid sends for one 3 × 3 convolution of its slice.

    Rows first, then columns of a slice that already has its rows.
    """
    side = size // SIDE
    return 2 * channels * (2 * side + 2 * (side + 2))


def by_hand(size: int) -> int:
    """Return the least bytes that a chip sends in a step."""
    c = config()
    total, before = 0, c.in_channels
    for level, width in enumerate(c.widths):
        here = size >> level
        blocks = [(before, width)] + ([(2 * width, width)] if level < c.levels - 1 else [])
        for first, second in blocks:  # the image itself has no gradient
            total += 2 * halo(here, first) + 2 * halo(here, second)  # forward, and again in the backward pass
            total += (halo(here, first) if (level, first) != (0, c.in_channels) else 0) + halo(here, second)
        before = width
    params = sum(x.size for x in jax.tree.leaves(_shapes()))
    return total + 2 * 4 * params * (CHIPS - 1) // CHIPS


def _shapes() -> object:
    layout = jp.Layout(jp.MeshSpec(data=1).abstract(1), jp.Rules(**RULES))
    return jp.abstract_state(
        layout, lambda key: make_unet(key, in_channels=8, channels=16, levels=4), optax.sgd(0.1)
    ).params


def main() -> int:
    """Compile both, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="height and width of an image")
    size: int = parser.parse_args().size
    try:
        whole = compile_unet(size, sliced=False)
        print(f"unsliced: fits, peak {whole.memory['peak'] / MIB:,.0f} MiB")
        refused = False
    except CompileError as error:
        print(f"unsliced: {str(error).splitlines()[0][:300]}")
        refused = True
    program = compile_unet(size, sliced=True)
    audit = jp.audit(program)
    wire, least = audit.wire_bytes(), by_hand(size)
    print(
        f"sliced 4 × 4: peak {program.memory['peak'] / MIB:,.0f} MiB, wire {wire / 1e6:,.2f} MB "
        f"(by hand {least / 1e6:,.2f}), compiled in {program.compile_cpu_seconds:.0f} CPU s"
    )
    print(audit)
    return 0 if refused and wire <= 1.1 * least else 1


if __name__ == "__main__":
    sys.exit(main())
