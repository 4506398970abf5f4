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
# A model is sharded over many devices so that it fits in memory and trains faster.
# In `jaxpar`, one value describes the sharding. This value is the *layout*: a mesh of devices and a table of rules.
#
# In this notebook you write a small model once and run it in two layouts.
# You see how its weights are sharded, change one rule, and see what changed.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/01_layouts.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

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
# JAX can simulate several devices on your CPU.
# Call `jp.simulate_devices` before JAX computes anything.

# %%
jp.simulate_devices(8)
jax.devices()

# %% [markdown]
# ## A model with named dims
#
# Here is a two-layer network. Its code does not mention devices.
# It only names the dims: `axes` names the dims of a weight, and `jp.hint` names the dims of an activation.

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
# Pass `jaxpar` a function that builds the model from a random key, instead of the model itself.
# `jaxpar` then creates each weight already sharded, so no device ever has to hold the full model.


# %%
def make_model(key):
    return Network(rngs=nnx.Rngs(key))


tx = optax.adam(1e-2)

# %% [markdown]
# ## The first layout: data parallelism
#
# The mesh has one axis, `data`, of eight devices.
# Each rule maps the name of a dim to a mesh axis, or to `None`.
#
# Here the batch is sharded over eight devices. `embed` and `mlp` are not sharded, so every device holds the full model.

# %%
mesh = jp.MeshSpec(data=8).build()
dp = jp.Layout(mesh, jp.Rules(batch="data", embed=None, mlp=None))

# %% [markdown]
# `jp.explain` shows how the layout shards every tensor, and why.
# It only uses shapes, so it allocates no memory.
#
# In the column `spec`, a dot marks a dim that is not sharded. The last column gives the reason.

# %%
jp.explain(dp, make_model, tx)

# %% [markdown]
# `jp.analysis.draw_shards` draws one weight and labels each block with the devices that hold it.
# This weight has a single block, and all eight devices hold it.

# %%
jp.analysis.draw_shards(dp, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# ## Change one rule
#
# Add one rule to the table: *for parameters*, `embed` is sharded over `data`.
# This is fully sharded data parallelism (FSDP). Activations keep the base rule, `embed=None`.

# %%
fsdp = jp.Layout(mesh, dp.rules.replace(params={"embed": "data"}))
jp.explain(fsdp, make_model, tx)

# %% [markdown]
# The weight is now sharded: each device holds eight of its 64 rows.
# The model's code did not change.

# %%
jp.analysis.draw_shards(fsdp, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# The optimizer state is sharded like the parameters.
# `up/bias` has only the dim `mlp`, which maps to no axis. Therefore `up/bias` and its Adam moments stay replicated,
# and the bytes per device shrink by slightly less than a factor of eight.

# %%
for name, layout in {"data parallel": dp, "fully sharded": fsdp}.items():
    total = jp.explain(layout, make_model, tx).total("params", "opt_state")
    print(f"{name}: {total.bytes:,} bytes in total, {total.device_bytes:,} on each device")

# %% [markdown]
# Rules can use several mesh axes.
# On a mesh of `data` 4 × `model` 2, this layout shards both dims of the weight.

# %%
fsdp_tp = jp.Layout(
    jp.MeshSpec(data=4, model=2).build(),
    jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"}),
)
jp.analysis.draw_shards(fsdp_tp, "embed", "mlp", shape=(EMBED, MLP), role="params", path="params/up/kernel")

# %% [markdown]
# ## Make a mistake
#
# This model contains two mistakes: a misspelled dim, and a size that is not a multiple of eight.


# %%
class BrokenNetwork(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, kernel_init=axes(normal)("embed", "mpl"), rngs=rngs)
        self.down = nnx.Linear(MLP, 60, use_bias=False, kernel_init=axes(normal)("mlp", "embed"), rngs=rngs)


# %% [markdown]
# `jp.init` would reject this model. `jp.check` finds the mistakes without building the model.
#
# For each problem, the error reports the tensor, its dims, its sizes and a remedy.

# %%
try:
    jp.check(fsdp, lambda key: BrokenNetwork(rngs=nnx.Rngs(key)), tx)
except jp.errors.LayoutError as error:
    print(error)

# %% [markdown]
# ## A mesh you do not have
#
# An *abstract* mesh has sizes but no devices.
# It supports everything except running the model, so you can check a large job on a laptop.
#
# This layout combines an abstract mesh of 4,096 devices with the rules of a layout that comes with `jaxpar`.

# %%
rules = jp.Layout.from_yaml("../configs/layouts/fsdp_tp.yaml", devices=4096).rules
large = jp.Layout(jp.MeshSpec(data=-1, model=8).abstract(4096), rules)
print(large.sizes)

# %% [markdown]
# The model is Llama 3.1 70B. Shapes and dim names describe the batch.
# Given the batch and the loss, `jp.check` also checks the activations.

# %%
config = preset("llama3_1_70b")
tokens = jp.tag(jax.ShapeDtypeStruct((1024, 8192), jnp.int32), "batch", "seq")
job = {"batch": {"tokens": tokens, "targets": tokens}, "loss_fn": next_token_loss}

report = jp.check(large, make_llama(config), optax.adamw(3e-4), max_replicated=0.02, **job)
total = report.total("params", "opt_state")
print(f"{config.params:,} parameters on {report.devices:,} devices: no problem found")
print(
    f"{total.bytes / 2**30:,.0f} GiB of parameters and optimizer state, "
    f"{total.device_bytes / 2**20:,.0f} MiB on each device"
)

# %% [markdown]
# This is one of its weights. It has too many blocks to draw them all, so the picture shows the first and the last.

# %%
gate = next(row for row in report.rows if row.path == "params/blocks/mlp/gate")
jp.analysis.draw_shards(large, *gate.dims, shape=gate.shape, role="params", path=gate.path)

# %% [markdown]
# With plain data parallelism, every device would hold the full model.
# `max_replicated` limits the replicated fraction of the bytes, so `jp.check` raises an error.

# %%
large_dp = jp.Layout.from_yaml("../configs/layouts/dp.yaml", devices=4096)
try:
    jp.check(large_dp, make_llama(config), optax.adamw(3e-4), max_replicated=0.02)
except jp.errors.LayoutError as error:
    print(error)

# %% [markdown]
# ## Train in both layouts
#
# Now train the small network. Its task is to predict the output of a fixed random function.

# %%
rng = np.random.default_rng(0)
teacher = rng.normal(size=(EMBED, EMBED)) / np.sqrt(EMBED)
x = rng.normal(size=(128, EMBED)).astype(np.float32)
y = np.tanh(x @ teacher).astype(np.float32)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


# %% [markdown]
# The training loop is the same for every layout.
# `jp.shard_array` shards the batch, `jp.init` creates the sharded state, and `jp.train_step` returns an ordinary jitted
# function.


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
# A layout decides where values are stored, not what they are. The two loss curves coincide.

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
ax.plot(range(1, 11), dp_losses, color="tab:orange", linewidth=5, alpha=0.5, label="data parallel")
ax.plot(range(1, 11), fsdp_losses, color="tab:blue", marker="o", markersize=4, linewidth=1, label="fully sharded")
ax.set(xlabel="step", ylabel="loss before the step", xticks=range(1, 11), ylim=(0, None))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The losses agree to 1e-5, but need not be bitwise equal: each layout adds numbers in a different order.

# %%
difference = np.abs(dp_losses - fsdp_losses).max()
print(f"largest difference between the losses: {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# The trained weights are ordinary JAX arrays, and each array reports its shards.

# %%
for state in (dp_state, fsdp_state):
    kernel = state.params["up"]["kernel"]
    print(f"device 3 holds a shard {kernel.addressable_shards[3].data.shape} of the weight {kernel.shape}")

# %% [markdown]
# ## What you have seen
#
# - A model names its dims and does not mention devices.
# - A layout is a mesh and a table of rules. Changing one rule reshards the weights.
# - `jp.explain` shows how every tensor is sharded, and why. `jp.check` rejects a model that does not fit the layout.
# - Both work on a mesh that you do not have.
# - The layout does not change the result, up to rounding.
#
# ## Exercises
#
# 1. Shard the weights over `model` only: which rule do you remove from `fsdp_tp`?
# 2. Train with `fsdp_tp`. Do the losses stay the same?
# 3. Set `EMBED = 60` at the top. What does `jp.init` say?
#
# **Answers.** 1. `params={"embed": "data"}`; the weights are then replicated over `data`. 2. `train(fsdp_tp)` gives the
# same losses to 1e-5. 3. An error: 60 is not a multiple of 8; it names the weight, the dim and the axis.
