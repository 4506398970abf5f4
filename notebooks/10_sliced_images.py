# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Images too large for one device
#
# An image is cut into slices along its height and its width, one for each device. A convolution reads beyond the edge
# of a slice, so neighbours exchange their edges, the halo. The results are those of the whole image.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/10_sliced_images.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## An image in slices
#
# `HEIGHT`, `WIDTH` and the numbers of slices are yours to change. Two devices share the height and four the width.

# %%
HEIGHT, WIDTH, CHANNELS = 64, 128, 4
ROWS, COLUMNS = 2, 4

mesh = jp.MeshSpec(context=ROWS, ulysses=COLUMNS).build()
layout = jp.Layout(mesh, jp.Rules(batch=None, height="context", width="ulysses", channels=None))

y, x = np.mgrid[:HEIGHT, :WIDTH] / 16
picture = np.sin(x * y)[None, :, :, None] * np.ones(CHANNELS)
image = jp.shard_array(layout, picture.astype(np.float32), None, "height", "width", "channels")
print(image.sharding.spec, {shard.data.shape for shard in image.addressable_shards})

figure, axes = plt.subplots(ROWS, COLUMNS, figsize=(9, 3))
for shard in image.addressable_shards:
    rows, columns = shard.index[1].start or 0, shard.index[2].start or 0
    panel = axes[rows * ROWS // HEIGHT][columns * COLUMNS // WIDTH]
    panel.imshow(np.asarray(shard.data)[0, :, :, 0], vmin=-1, vmax=1)
    panel.set_title(str(shard.device), fontsize=8)
    panel.axis("off")
plt.show()

# %% [markdown]
# ## A convolution
#
# A Flax layer takes `jp.spatial.conv` instead of its own convolution. For a kernel of 5 × 5, each device needs only two
# more rows or columns from each neighbour.


# %%
class Block(nnx.Module):
    def __init__(self, conv, rngs):
        self.conv = nnx.Conv(CHANNELS, CHANNELS, (5, 5), conv_general_dilated=conv, rngs=rngs)
        self.norm = nnx.GroupNorm(CHANNELS, num_groups=2, rngs=rngs)

    def __call__(self, x):
        return jp.hint(nnx.silu(self.norm(self.conv(x))), "batch", "height", "width", "channels")


def loss(model, x):
    return jnp.mean(model(x) ** 2)


with layout:
    sliced = Block(jp.spatial.conv, nnx.Rngs(0))
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(sliced, image)

one_device = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), layout.rules)
with one_device:
    whole = Block(jax.lax.conv_general_dilated, nnx.Rngs(0))
    wanted, wanted_gradients = nnx.jit(nnx.value_and_grad(loss))(whole, picture.astype(np.float32))

np.testing.assert_allclose(value, wanted, rtol=1e-5)
for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
print(f"loss {float(value):.6f}, in slices and whole")

# %% [markdown]
# ## What is sent
#
# The audit of the compiled program lists every transfer. Compare it with the whole image, of which each device would
# need the slices of the others if it were gathered.

# %%
with layout:
    forward = jax.jit(lambda x: nnx.merge(*nnx.split(sliced))(x)).lower(image).compile()
audit = jp.audit(forward, mesh=mesh)
gathered = image.nbytes * (ROWS * COLUMNS - 1) // (ROWS * COLUMNS)
print(f"sent by a device {audit.wire_bytes():,.0f} bytes; to gather the image: {gathered:,} bytes")

widths = [1, 3, 5, 7, 9]
sent = []
for width in widths:
    kernel = jnp.ones((width, width, CHANNELS, CHANNELS)) / width**2
    convolve = lambda x, kernel=kernel: jp.spatial.conv(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    with layout:
        sent.append(jp.audit(jax.jit(convolve).lower(image).compile(), mesh=mesh).wire_bytes())
plt.plot(widths, np.array(sent) / 1024, "o-", label="in slices")
plt.axhline(gathered / 1024, color="gray", label="the image gathered")
plt.xlabel("width of the kernel")
plt.ylabel("KiB sent by a device")
plt.legend()
plt.show()

# %% [markdown]
# Reading slices of files, pooling, resizing, volumes, a U-Net: [the guide](../docs/guides/sliced_images.md).
#
# ## Exercises
#
# 1. Let all eight devices share the width. Which halo is sent now?
# 2. Make the image one column wider. What does the error say?
# 3. Give the channels of the kernel to FSDP as well.
#
# **Answers.** 1. `ROWS, COLUMNS = 1, 8`: only columns are sent, but each of the height of the whole image. 2. Slices must
# divide the image; the error names the dim, its size and the axis. 3. Take two of the devices for `data`, and add
# `params={"channels": "data"}` to the rules.
