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
# # Your script on all devices
#
# Here is a training script for one device: a small language model in Flax NNX, as anybody might write it.
# You change three lines, and it trains on eight devices, with the same losses.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/04_your_script.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import display

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## The script
#
# The model, the loss and the step name no device and no dim.

# %%
VOCAB, EMBED, MLP = 64, 32, 128


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, EMBED, decode=False, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def batch_of(number):
    tokens = np.random.default_rng(number).integers(0, VOCAB, (16, 17), dtype=np.int32) // 4
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def new_objects():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


# %% [markdown]
# On one device:

# %%
model, optimizer = new_objects()
one = [float(train_step(model, optimizer, batch_of(number))) for number in range(20)]

# %% [markdown]
# ## Three lines
#
# Import `jaxpar`, hand over the step with the arguments of its first call, and call what comes back in its place.
# The table shows which layout was chosen and why, the names that were found for the dims of each array, and how it is
# sharded.

# %%
model, optimizer = new_objects()
parallel_step = jp.parallelize(train_step, model, optimizer, batch_of(0))
display(parallel_step)

# %% [markdown]
# The names come from a trace of the loss. Each has a reason:

# %%
print(parallel_step.annotation)

# %% [markdown]
# ## The same losses
#
# The objects are still yours: each call changes `model` and `optimizer` in place.

# %%
many = [float(parallel_step(model, optimizer, batch_of(number))) for number in range(20)]
np.testing.assert_allclose(many, one, rtol=1e-4)

plt.plot(one, "o", mfc="none", label="one device")
plt.plot(many, label="eight devices")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()

# %% [markdown]
# ## The shards
#
# Each device holds an eighth of the weight that widens the stream, and gathers the others when it multiplies.

# %%
jp.analysis.draw_shards(parallel_step.layout, "embed", "mlp", shape=(EMBED, MLP), role="params", path="model/up/kernel")

# %%
print([shard.data.shape for shard in model.up.kernel[...].addressable_shards])

# %% [markdown]
# ## Another layout
#
# `layout=` takes a layout of your own, with the names of the table: here four groups of two, which split the heads and
# the inner dim of the feed-forward layer.

# %%
rules = parallel_step.annotation.rules(batch="data", heads="model", mlp="model", params={"embed": "data"})
layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), rules)
model, optimizer = new_objects()
tensor_step = jp.parallelize(train_step, model, optimizer, batch_of(0), layout=layout)
np.testing.assert_allclose([float(tensor_step(model, optimizer, batch_of(n))) for n in range(5)], one[:5], rtol=1e-4)
jp.analysis.draw_shards(layout, "embed", "mlp", shape=(EMBED, MLP), role="params", path="model/up/kernel")

# %% [markdown]
# Checkpoints, evaluation, and scripts in Linen: [the guide](../docs/guides/parallelize.md).
#
# ## Exercises
#
# 1. Make the model twice as wide. Which lines change?
# 2. Shard the vocabulary over `model` too.
# 3. Print the shards of the weight that narrows the stream.
#
# **Answers.** 1. `EMBED = 64`, and nothing else: names are found again. 2. Add `"vocab": "model"` to the rules. 3. As for
# `up`, with `model.down.kernel`: each device holds an eighth.
