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
# # Will it fit?
#
# Before you book chips, you want to know whether a model fits on them, and in which layout. In this notebook you ask
# that for a model of 1.1 billion parameters and slices of 16 TPU chips, on a laptop: the step is traced, nothing is
# allocated, and no chip and no TPU compiler is needed.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/06_will_it_fit.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jaxpar as jp
from jaxpar.models import make_llama, next_token_loss, preset

# %% [markdown]
# ## The question
#
# Change the model (`"1b"`, `"llama3_1_8b"`, `"llama3_1_70b"`), the batch or the topology.

# %%
MODEL, TOPOLOGY, ROWS, SEQ = "1b", "v5e:4x4", 32, 2048
CHIP = {"v5e": 16, "v6e": 32, "v5p": 95}[TOPOLOGY.split(":")[0]]  # GiB of memory on one chip

config = preset(MODEL, remat="full")
tokens = jp.tag(jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32), "batch", "seq")
job = {"batch": {"tokens": tokens, "targets": tokens}, "loss_fn": next_token_loss}
print(f"{config.params:,} parameters, {ROWS * SEQ:,} tokens per step, {TOPOLOGY}")

# %% [markdown]
# A mesh on a topology knows the chips, but has none. `jp.explain` traces the step for them and adds up what one chip
# holds when most is alive.


# %%
def memory(layout_name, **sizes):
    rules = jp.Layout.from_yaml(f"../configs/layouts/{layout_name}.yaml", devices=16).rules
    layout = jp.Layout(jp.MeshSpec(**sizes).on(TOPOLOGY), rules)
    return jp.explain(layout, make_llama(config), optax.adamw(3e-4), **job).memory


fsdp = memory("fsdp", data=-1)
for part, size in fsdp.parts.items():
    print(f"{part:16} {size / 2**30:6.2f} GiB")
print(f"{'total':16} {fsdp.total / 2**30:6.2f} GiB of {CHIP}")

# %% [markdown]
# ## Compare layouts
#
# Data parallelism keeps all weights and optimizer moments on every chip. Fully sharded data parallelism (FSDP) keeps a
# sixteenth. Tensor parallelism splits the heads and the inner dims too, so it also splits activations.

# %%
LAYOUTS = {
    "data parallel": ("dp", {"data": -1}),
    "FSDP 16": ("fsdp", {"data": -1}),
    "FSDP 4 × tensor 4": ("fsdp_tp", {"data": -1, "model": 4}),
}
found = {name: memory(layout, **sizes) for name, (layout, sizes) in LAYOUTS.items()}


def draw(found):
    figure, ax = plt.subplots(figsize=(7, 0.5 + 0.55 * len(found)), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    parts = [part for part in next(iter(found.values())).parts if any(one.parts[part] for one in found.values())]
    left = dict.fromkeys(found, 0.0)
    for color, part in zip(colors, parts, strict=False):
        sizes = [one.parts[part] / 2**30 for one in found.values()]
        ax.barh(list(found), sizes, left=list(left.values()), color=color, label=part, height=0.7)
        left = {name: left[name] + size for name, size in zip(found, sizes, strict=True)}
    ax.axvline(CHIP, color="black", linestyle="--", linewidth=1)
    ax.text(CHIP, -0.55, "memory of a chip", ha="center", va="bottom", fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="GiB on one chip at the peak of a step")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    plt.show()


draw(found)

# %% [markdown]
# ## What fills it? What can be given back?
#
# The saved activations depend on what the backward pass recomputes. `remat="full"` saves only the input of each layer
# and recomputes the rest; `"none"` saves everything.

# %%
saved = {}
for remat in ("full", "dots", "none"):
    config = preset(MODEL, remat=remat)
    saved[f"FSDP 16, remat {remat}"] = memory("fsdp", data=-1)
draw(saved)

# %% [markdown]
# ## How sure is that?
#
# This is an estimate from a trace. [Measured against compiled steps](../docs/measured/memory.md), its errors are a few
# percent for most layouts. To be certain, compile the step with the compiler of those chips, still without a chip:
#
# ```sh
# jaxpar check configs/bench/1b_fsdp16.yaml --topology v5e:4x4     # extra tpu
# ```
#
# It says whether the program fits, what fills the memory, what it sends, and what to change. `jaxpar plan` tries all
# layouts that way.
#
# ## Exercises
#
# 1. Which is the longest sequence at which FSDP 16 still fits with `remat="full"`?
# 2. Does Llama 3.1 8B fit on 16 chips of v5e? On v5p?
# 3. What would you do if only the optimizer's moments are too large?
#
# **Answers.** 1. Raise `SEQ` and lower `ROWS` so that a chip keeps at least one row: the saved inputs of the layers
# grow with the tokens of a chip. 2. Set `MODEL` and `TOPOLOGY`: its weights and moments alone are 96 GB in fp32, 6 GB
# on each of 16 chips, so FSDP fits on both, and data parallelism, which also needs the gradients, on neither.
# 3. Shard them, [ZeRO 1](../docs/guides/zero.md), or keep them in the [memory of the host](../docs/guides/offload.md).
