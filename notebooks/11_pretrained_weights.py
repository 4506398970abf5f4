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
# # Pretrained weights, adapters, integers
#
# A checkpoint of Hugging Face becomes a sharded state without ever being whole on one device. You train adapters beside
# the frozen weights, merge them, round the result to integers, and write files that transformers reads.
# The notebook makes a small checkpoint of random weights, so nothing is downloaded; a folder of a real model works alike.
# It runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/11_pretrained_weights.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpar as jp
from jaxpar.interop import huggingface
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss

jp.simulate_devices(8)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A checkpoint to start from

# %%
config = LlamaConfig(vocab=256, layers=4, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192)
dims = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers", "seq", "residual_seq")
one = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch="data", **dict.fromkeys(dims)))
huggingface.export(folder / "published", jp.init(one, make_llama(config), optax.identity()).params, config)
for file in sorted((folder / "published").iterdir()):
    print(f"{file.stat().st_size:9,} bytes  {file.name}")

# %% [markdown]
# ## Loaded into any layout
#
# `DATA` × `MODEL` devices: fully sharded data parallelism and tensor parallelism. Each device reads its own bytes of the
# files. The picture shows one weight: which device holds which block.

# %%
DATA, MODEL = 4, 2

rules = one.rules.replace(heads="model", kv_heads="model", mlp="model", vocab="model", params={"embed": "data"})
layout = jp.Layout(jp.MeshSpec(data=DATA, model=MODEL).build(), rules)
config = huggingface.read_config(folder / "published")
weights = huggingface.load(layout, folder / "published", config=config)
jp.analysis.draw_shards(layout, "embed", "mlp", shape=(64, 192), role="params", path="blocks/mlp/up")

# %% [markdown]
# ## Adapters
#
# `RANK` decides how many numbers are trained beside each chosen weight. The rest is frozen: no gradient, no optimizer
# state.

# %%
RANK = 4

adapted = jp.lora.adapt(
    jp.models.make_decoder(config), jp.lora.LoraConfig(rank=RANK, alpha=8, targets=("attention/*", "mlp/*"))
)
tx = optax.adamw(1e-2)
state = jp.lora.init_from(layout, adapted, tx, weights)
trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
frozen = sum(leaf.size for leaf in jax.tree.leaves(weights))
print(f"{trained:,} numbers are trained, {frozen:,} are frozen")


def batch_of(number):
    letters = np.random.default_rng(number).integers(97, 107, (16, 1)) + np.arange(33) % 5
    return {"tokens": letters[:, :-1].astype(np.int32), "targets": letters[:, 1:].astype(np.int32)}


step = jp.train_step(layout, next_token_loss)
losses = []
for number in range(40):
    state, metrics = step(state, batch_of(number))
    losses.append(float(metrics["loss"]))
plt.plot(losses)
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# ## Merged, rounded, exported
#
# `merge` adds each pair of small matrices to its weight. The weights of the feed-forward layers, as integers of 8 or 4
# bits, need less memory; how much the loss grows is what you pay.

# %%
merged = jp.lora.merge(state)
test = batch_of(1000)
decoder = jp.abstract_state(layout, jp.models.make_decoder(config), optax.identity()).metadata.kind
loss_of = jax.jit(lambda params: next_token_loss(decoder.merge(params, {}), test))
weights = huggingface.load(layout, folder / "published", config=config)  # the steps have reused the memory of the first
bars = {"published": (weights, jp.compression.bytes_of(weights)), "tuned": (merged, jp.compression.bytes_of(merged))}
for bits in (8, 4):
    integers = jp.compression.QuantizeConfig(targets=("*blocks/mlp/*",), bits=bits, group=32)
    rounded = jp.compression.quantize(merged, integers)
    bars[f"int{bits}"] = (jp.compression.dequantize(rounded), jp.compression.bytes_of(rounded))
with layout:
    found = {name: float(loss_of(params)) for name, (params, _) in bars.items()}
for name, loss in found.items():
    print(f"{name:10} loss {loss:.3f}  {bars[name][1] / 1024:7.0f} KiB")

huggingface.export(folder / "tuned", merged, config)
again = huggingface.load(one, folder / "tuned", config=config)
jax.tree.map(np.testing.assert_array_equal, again, merged)
print("the exported files hold the merged weights, bit by bit")

# %% [markdown]
# From the command line, with a tokenizer and text: [Hugging Face weights](../docs/guides/huggingface.md),
# [adapters](../docs/guides/finetune.md), [integers](../docs/guides/quantize.md).
#
# ## Exercises
#
# 1. Train with `RANK = 1`. How far does the loss come?
# 2. Adapt the attention alone.
# 3. Round to 4 bits in groups of 64 and of 16. What does the loss do, and what the bytes?
#
# **Answers.** 1. Change the number and run all cells: the loss still falls, more slowly. 2. `targets=("attention/*",)`.
# 3. Smaller groups have more scales: a smaller loss, and more bytes.
