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
# # Bring your own Flax model
#
# Here is a model that somebody wrote for one device, without a word about sharding. In this notebook `jaxpar` finds
# names for the dims of its weights, you choose a layout with these names, and the model trains on eight devices with
# the losses of one. The model's code does not change.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/05_your_model.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from IPython.display import display

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## The model
#
# A classifier in Linen: two residual blocks. Change the sizes; the rest of the notebook follows.

# %%
WIDTH, INNER, CLASSES = 64, 256, 10


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(INNER)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x)


def make_model(key):
    return Classifier().init(key, jnp.zeros((1, 32)))


def loss_fn(variables, batch):
    logits = Classifier().apply(variables, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batch_of(number):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(64, 32)).astype(np.float32)
    return {"x": x, "label": np.argmax(x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES], axis=1).astype(np.int32)}


# %% [markdown]
# ## Names for the dims
#
# `jp.annotate` traces the loss once, for shapes alone. Two dims that an operation makes one get one name. The table
# gives a reason for each name, and the dims of every weight.

# %%
found = jp.annotate(make_model, loss_fn, batch_of(0))
display(found)

# %% [markdown]
# ## A layout
#
# A layout says which mesh axis splits which name. Four groups of two devices: the batch is split over the groups, the
# inner dim of each block over the two devices of a group, and the stored weights over all of them.

# %%
rules = found.rules(batch="data", mlp="model", params={"embed": "data"})
layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), rules)
tx = optax.adam(3e-3)
jp.explain(layout, found.make_model, tx)

# %% [markdown]
# The weight that widens a block, and the devices that hold its pieces:

# %%
jp.analysis.draw_shards(layout, "embed", "mlp", shape=(WIDTH, INNER), role="params", path="Dense_1/kernel")

# %% [markdown]
# ## How much memory does each layout need?
#
# `jp.explain` counts without running anything. Compare three layouts by what one device stores:

# %%
LAYOUTS = {
    "data parallel": found.rules(batch="data"),
    "tensor parallel": found.rules(batch="data", mlp="model"),
    "both, and sharded storage": rules,
}
sizes = {
    name: jp.explain(jp.Layout(layout.mesh, one), found.make_model, tx).total("params", "opt_state").device_bytes
    for name, one in LAYOUTS.items()
}
figure, ax = plt.subplots(figsize=(6, 1.8), layout="constrained")
ax.barh(list(sizes), [size / 1024 for size in sizes.values()], color="tab:blue")
ax.invert_yaxis()
ax.set(xlabel="KiB on one device: weights and optimizer")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# For a real model and real chips, `jaxpar plan CONFIG --topology v5e:4x4` compares all layouts, compiles the best ones
# for that hardware, and explains its choice. That needs no chips either, but the package of the TPU compiler.
#
# ## Train it, and compare with one device


# %%
def train(layout):
    state = jp.init(layout, found.make_model, tx, seed=0)
    step = jp.train_step(layout, found.loss_fn)
    losses = []
    for number in range(15):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return losses


one = train(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), rules))
many = train(layout)
np.testing.assert_allclose(many, one, rtol=1e-5)

figure, ax = plt.subplots(figsize=(5.5, 3), layout="constrained")
ax.plot(one, "o", mfc="none", label="one device")
ax.plot(many, label="eight devices")
ax.set(xlabel="step", ylabel="loss")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. Split the classes over `model` too. Which name do they have, and why?
# 2. Set `INNER = 255`. What does `jp.init` say?
# 3. Give the last weight a name of your own.
#
# **Answers.** 1. The table calls them by the name of the last weight's second dim; add it to the rules with the value
# `"model"`. 2. It raises an error: 255 is not a multiple of 2, and it names the weight, the dim and the axis.
# 3. `jp.annotate(make_model, loss_fn, batch_of(0), names={"Dense_5/kernel": ("embed", "classes")})`.
#
# More: [models without names](../docs/guides/annotate.md), [your script on all devices](04_your_script.ipynb),
# [the planner](../docs/guides/plan.md).
