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
# # Layouts
#
# A model is split over many devices so that it fits and runs faster.
# In `jaxpar` the split is described by one value, the *layout*: a mesh of devices and a table of rules.
#
# In this notebook you write a small model once and run it in two layouts.
# You look at where its weights lie, change one rule, and look again.
# It needs no accelerator.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.models import make_llama, next_token_loss, preset
from jaxpar.nnx import axes

# %% [markdown]
# ## Eight devices
#
# JAX can act as if your CPU were several devices.
# This must happen before JAX computes anything.

# %%
jp.simulate_devices(8)
jax.devices()

# %% [markdown]
# ## A model with names
#
# Here is a two-layer network. Nothing in it mentions devices.
# It only gives each dim a name: `axes` names the dims of a weight, `jp.hint` those of an activation.

# %%
EMBED, MLP = 64, 256
normal, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros


class Network(nnx.Module):
    def __init__(self, rngs):
        kernel, bias = axes(normal), axes(zeros)
        self.up = nnx.Linear(EMBED, MLP, kernel_init=kernel("embed", "mlp"), bias_init=bias("mlp"), rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, kernel_init=kernel("mlp", "embed"), bias_init=bias("embed"), rngs=rngs)

    def __call__(self, x):
        hidden = jp.hint(jax.nn.gelu(self.up(x)), "batch", "mlp")
        return jp.hint(self.down(hidden), "batch", "embed")


# %% [markdown]
# `jaxpar` wants a function that builds the model from a random key, not the model itself.
# That way each weight is created where it belongs and is never whole on one device first.


# %%
def make_model(key):
    return Network(rngs=nnx.Rngs(key))


tx = optax.adam(1e-2)

# %% [markdown]
# ## The first layout: data parallelism
#
# The mesh has one axis, `data`, of eight devices.
# Each rule sends a name to a mesh axis, or to `None`.
#
# Here the batch is split eight ways. `embed` and `mlp` stay whole, so every device holds the whole model.

# %%
mesh = jp.MeshSpec(data=8).build()
dp = jp.Layout(mesh, jp.Rules(batch="data", embed=None, mlp=None))

# %% [markdown]
# `jp.explain` shows where every tensor would lie, and why.
# It works from shapes, so nothing is allocated.
#
# Look at the column `spec`: a dot is a dim that is not split. The last column gives the reason.

# %%
jp.explain(dp, make_model, tx)

# %% [markdown]
# The first weight as a picture. Each block lists the devices that hold it.
# There is one block, and all eight devices hold it.

# %%
jp.analysis.draw_shards(dp, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# ## Change one rule
#
# The same table with one rule more: *for parameters*, `embed` is split over `data`.
# This is fully sharded data parallelism. Activations keep the base rule, `embed=None`.

# %%
fsdp = jp.Layout(mesh, dp.rules.replace(params={"embed": "data"}))
jp.explain(fsdp, make_model, tx)

# %% [markdown]
# The weight has moved. Each device now holds eight of its 64 rows.
# The model was not touched.

# %%
jp.analysis.draw_shards(fsdp, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# The optimizer state follows the parameters, so it is split too.
# `up/bias` has only the dim `mlp`, which has no axis. It stays whole, and so do its moments.
# That is why the bytes on each device fall by a little less than eight times.

# %%
for name, layout in {"data parallel": dp, "fully sharded": fsdp}.items():
    total = jp.explain(layout, make_model, tx).total("params", "opt_state")
    print(f"{name}: {total.bytes:,} bytes in all, {total.device_bytes:,} of them on each device")

# %% [markdown]
# A rule can also name a second axis.
# On a mesh of `data` 4 × `model` 2 this layout splits both dims of the weight.

# %%
both = jp.Layout(
    jp.MeshSpec(data=4, model=2).build(),
    jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"}),
)
jp.analysis.draw_shards(both, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# ## Make a mistake
#
# This model has two: a misspelled name, and a size that eight devices cannot share.


# %%
class Mistaken(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, kernel_init=axes(normal)("embed", "mpl"), rngs=rngs)
        self.down = nnx.Linear(MLP, 60, use_bias=False, kernel_init=axes(normal)("mlp", "embed"), rngs=rngs)


# %% [markdown]
# `jp.init` would refuse to build it. `jp.check` says so before anything is built.
#
# Read the error: for each problem it names the tensor, its dims and its sizes, and says what to do.

# %%
try:
    jp.check(fsdp, lambda key: Mistaken(rngs=nnx.Rngs(key)), tx)
except jp.errors.LayoutError as error:
    print(error)

# %% [markdown]
# ## A mesh you do not have
#
# An *abstract* mesh has sizes but no devices.
# Everything up to running works on it, so you can check a large job on a laptop.
#
# Here are 4,096 devices, and the rules of one of the layouts that come with `jaxpar`.

# %%
rules = jp.Layout.from_yaml("../configs/layouts/fsdp_tp.yaml", devices=4096).rules
large = jp.Layout(jp.MeshSpec(data=-1, model=8).abstract(4096), rules)
print(large.sizes)

# %% [markdown]
# The model is Llama 3.1 70B. A batch is described by shapes and names.
# With the batch and the loss, the check follows the activations through the model too.

# %%
config = preset("llama3_1_70b")
tokens = jp.tag(jax.ShapeDtypeStruct((1024, 8192), jnp.int32), "batch", "seq")
job = {"batch": {"tokens": tokens, "targets": tokens}, "loss_fn": next_token_loss}

checked = jp.check(large, make_llama(config), optax.adamw(3e-4), max_replicated=0.02, **job)
total = checked.total("params", "opt_state")
print(f"{config.params:,} parameters on {checked.devices:,} devices: no problem found")
print(
    f"{total.bytes / 2**30:,.0f} GiB of parameters and optimizer state, {total.device_bytes / 2**20:,.0f} MiB a device"
)

# %% [markdown]
# One of its weights. The mesh has too many blocks to draw all, so you see the first and the last.

# %%
gate = next(row for row in checked.rows if row.path == "params/blocks/mlp/gate")
jp.analysis.draw_shards(large, *gate.dims, shape=gate.shape, role="params", path=gate.path)

# %% [markdown]
# With plain data parallelism the same model would lie whole on every device.
# `max_replicated` turns that into an error.

# %%
whole = jp.Layout.from_yaml("../configs/layouts/dp.yaml", devices=4096)
try:
    jp.check(whole, make_llama(config), optax.adamw(3e-4), max_replicated=0.02)
except jp.errors.LayoutError as error:
    print(error)

# %% [markdown]
# ## Train in both layouts
#
# Back to the small network. The task: predict what a fixed random function makes of its input.

# %%
rng = np.random.default_rng(0)
teacher = rng.normal(size=(EMBED, EMBED)) / np.sqrt(EMBED)
x = rng.normal(size=(128, EMBED)).astype(np.float32)
y = np.tanh(x @ teacher).astype(np.float32)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


# %% [markdown]
# The training loop does not depend on the layout.
# `jp.shard_array` splits the batch, `jp.init` builds the state in place, and `jp.train_step` returns an ordinary jitted function.


# %%
def train(layout, steps=10):
    batch = {"x": jp.shard_array(layout, x, "batch", "embed"), "y": jp.shard_array(layout, y, "batch", "embed")}
    state = jp.init(layout, make_model, tx, seed=0)
    step = jp.train_step(layout, loss_fn)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


dp_losses, dp_state = train(dp)
fsdp_losses, fsdp_state = train(fsdp)

# %% [markdown]
# A layout decides where the numbers lie, not what they are. The two curves lie on each other.

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
ax.plot(range(1, 11), dp_losses, color="tab:orange", linewidth=5, alpha=0.5, label="data parallel")
ax.plot(range(1, 11), fsdp_losses, color="tab:blue", marker="o", markersize=4, linewidth=1, label="fully sharded")
ax.set(xlabel="step", ylabel="loss before the step", xticks=range(1, 11), ylim=(0, None))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# They need not be equal to the last bit: sums over devices are taken in another order.
# They agree to 1e-5.

# %%
difference = np.abs(dp_losses - fsdp_losses).max()
print(f"largest difference of the losses: {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# The trained weights are ordinary JAX arrays. You can ask them where they lie.

# %%
for state in (dp_state, fsdp_state):
    kernel = state.params["up"]["kernel"]
    print(f"of {kernel.shape} device 3 holds {kernel.addressable_shards[3].data.shape}")

# %% [markdown]
# ## What you have seen
#
# - A model names its dims. It knows nothing of devices.
# - A layout is a mesh and a table of rules. One changed rule moves the weights.
# - `jp.explain` shows where everything lies and why. `jp.check` refuses what does not fit.
# - Both work on a mesh that you do not have.
# - The layout does not change the result.
