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
# # Pipelines
#
# A deep model can be cut between its layers into the *stages* of a pipeline: the first device holds the first layers,
# the second device holds the next layers, and so on.
# A batch passes through the stages in *microbatches*, so that all stages have work. Some stages are still idle at the
# start and at the end of a step. This idle time is the *bubble*.
#
# In this notebook you draw schedules, write a custom schedule, and see what happens when its stages deadlock.
# Then you train a small model on four stages, compare its gradients with those of one device, and count the bytes that
# the devices send.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/03_pipelines.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import HTML

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## Schedules
#
# A *schedule* defines which stage does what, and when. It is plain data, so you can inspect it before anything runs.
#
# GPipe first runs all forward passes, then all backward passes. Forward is blue, backward is orange, and the bubble is
# white. The numbers are microbatches.
# A backward pass takes twice as long as a forward pass, because it computes the gradients of the inputs and the
# gradients of the weights.

# %%
STAGES, MICROBATCHES = 4, 8
gpipe = jp.pipeline.schedule("gpipe", STAGES, MICROBATCHES)
gpipe.draw()

# %% [markdown]
# A stage must keep the activations of a microbatch from its forward pass until its backward pass. They are the *stash*.
# GPipe keeps all eight microbatches.

# %%
print(gpipe)

# %% [markdown]
# 1F1B has the same bubble, but it runs each backward pass as early as possible.
# Therefore the stash does not grow with the number of microbatches: the first stage keeps at most 2 · 4 − 1 = 7
# microbatches, whether the batch has 8 or 800 of them.

# %%
one_f_one_b = jp.pipeline.schedule("1f1b", STAGES, MICROBATCHES)
one_f_one_b.draw()

# %%
for microbatches in (8, 16, 32):
    stash = [max(jp.pipeline.schedule(name, STAGES, microbatches).stash) for name in ("gpipe", "1f1b")]
    print(f"{microbatches:2} microbatches: GPipe keeps {stash[0]:2}, 1F1B keeps {stash[1]}")

# %% [markdown]
# For S stages and M microbatches, the bubble is (S − 1) / (M + S − 1). More microbatches make it smaller.
#
# Shorter stages make it smaller, too. The *interleaved* schedule gives each stage two chunks of the model, one from its
# first half and one from its second half. Each microbatch passes through all stages twice.
# The work is the same, but each operation takes half as long, and the stages send twice as often. The second chunks are
# drawn in paler colours.

# %%
interleaved = jp.pipeline.schedule("interleaved", STAGES, MICROBATCHES, chunks=2)
interleaved.draw()

# %% [markdown]
# A *zero bubble* schedule splits the backward pass in two. Other stages wait for the gradients of the inputs (orange).
# No stage waits for the gradients of the weights (green), so these fill the gaps.

# %%
zero_bubble = jp.pipeline.schedule("zb_h1", STAGES, MICROBATCHES)
zero_bubble.draw(timing="stages")

# %% [markdown]
# In that picture each stage starts an operation as soon as its inputs exist, as papers assume. On TPUs all devices run
# *one* program, tick by tick. If some stages run a forward pass and others run a backward pass in the same tick, the
# tick takes the time of both. This makes `zb_h1` slow on TPUs.

# %%
zero_bubble.draw(timing="ticks")

# %% [markdown]
# `zb_uniform` is designed for a single program. The table compares all schedules, with both ways of timing.

# %%
chunks_per_stage = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_uniform": 1, "zb_h1": 1, "zb_v": 2}
rows = ""
for name, chunks in chunks_per_stage.items():
    schedule = jp.pipeline.schedule(name, STAGES, MICROBATCHES, chunks=chunks)
    bubbles = [jp.pipeline.simulate(schedule, timing=timing).bubble for timing in ("ticks", "stages")]
    cells = "".join(f"<td>{bubble:.1%}</td>" for bubble in bubbles)
    rows += f"<tr><td>{name}</td>{cells}<td>{max(schedule.held) / chunks:g}</td></tr>"
HTML(
    "<table><tr><th>schedule</th><th>bubble, one program</th><th>bubble, independent stages</th>"
    f"<th>microbatches kept</th></tr>{rows}</table>"
)

# %% [markdown]
# ## A custom schedule
#
# List the operations of each stage in order: `F0` is the forward pass of microbatch 0, and `B0` is its backward pass.

# %%
custom = jp.pipeline.schedule(["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"], stages=2, microbatches=3)
print(custom.show())
custom.draw()

# %% [markdown]
# Now make a mistake. Stage 0 runs the backward pass of microbatch 0 before the forward pass of microbatch 1. Stage 1
# runs the forward pass of microbatch 1 before the backward pass of microbatch 0.
# Each stage waits for the other, and on real devices the program would hang. `jp.pipeline.schedule` raises an error
# before anything runs.

# %%
try:
    jp.pipeline.schedule(["F0 B0 F1 B1", "F0 F1 B0 B1"], stages=2, microbatches=2)
except jp.errors.ScheduleError as error:
    print(error)

# %% [markdown]
# ## A model in three parts
#
# A pipeline must know which part of a model is the stack of layers, and what comes before and after it.
# `jp.pipeline.PipelineLoss` is a loss function that defines these three parts.
#
# The model has an embedding, eight equal layers, and a head. The weights of the layers are stacked along the first dim,
# `layers`. The task is to predict the next word, which a fixed table derives from the current word.

# %%
WORDS, EMBED, MLP, LAYERS, ROWS, SEQ = 32, 16, 32, 8, 32, 12


def make_model(key):
    a, b, c, d = jax.random.split(key, 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[-2])
    return {
        "words": jp.tag(jax.random.normal(a, (WORDS, EMBED)), "vocab", "embed"),
        "blocks": {
            "up": jp.tag(normal(b, LAYERS, EMBED, MLP), "layers", "embed", "mlp"),
            "down": jp.tag(normal(c, LAYERS, MLP, EMBED) / LAYERS, "layers", "mlp", "embed"),
        },
        "head": jp.tag(normal(d, EMBED, WORDS), "embed", "vocab"),
    }


def embed(model, batch):
    # A matmul instead of a lookup: it can be sharded over the vocabulary and over the tokens.
    return jax.nn.one_hot(batch["tokens"], WORDS) @ model["words"]


def layer(block, x, layer_inputs):
    return x + jnp.tanh(x @ block["up"]) @ block["down"]


def head(model, x, batch):
    logits = x @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


loss = jp.pipeline.PipelineLoss(layers="blocks", embed=embed, layer=layer, head=head)

# %%
rng = np.random.default_rng(0)
tokens = rng.integers(WORDS, size=(ROWS, SEQ)).astype(np.int32)
batch = {"tokens": tokens, "targets": rng.permutation(WORDS).astype(np.int32)[tokens]}

# %% [markdown]
# ## Four stages, two devices each
#
# The layout shards `layers` over the mesh axis `pipeline`: this rule defines the stages. It also shards `vocab` over
# `pipeline`, so that no stage holds the full embedding or the full head. Each microbatch is sharded over `data`.

# %%
rules = jp.Rules(batch="data", seq=None, embed=None, mlp=None, vocab="pipeline", layers="pipeline")
pipelined = jp.Layout(jp.MeshSpec(pipeline=4, data=2).build(), rules)
tx = optax.adam(1e-2)
jp.explain(pipelined, make_model, tx)

# %% [markdown]
# You can also call a `jp.pipeline.PipelineLoss` as an ordinary loss function. It then runs the layers one after the
# other, so it also works on one device.

# %%
single_device = jp.Layout(jp.MeshSpec(pipeline=1, data=1).build(jax.devices()[:1]), rules)
untrained = jp.init(single_device, make_model, tx, seed=0)
print(
    f"loss before training: {loss(untrained.params, batch):.3f}, "
    f"loss of a uniform guess among {WORDS} words: {np.log(WORDS):.3f}"
)

# %% [markdown]
# Pass the schedule to `jp.train_step` as `pipeline=`. The rest of the training loop is the same as without a pipeline.


# %%
def train(layout, pipeline=None, steps=12):
    with layout:
        sharded_batch = {name: jp.shard_array(layout, x, "batch", "seq") for name, x in batch.items()}
        state = jp.init(layout, make_model, tx, seed=0)
        step = jp.train_step(layout, loss, pipeline=pipeline, return_grads=True, donate=False)
        program = step.lower(state, sharded_batch).compile()
        losses, first_grads = [], None
        for _ in range(steps):
            state, metrics = program(state, sharded_batch)
            if first_grads is None:
                first_grads = jax.device_get(metrics["grads"])
            losses.append(float(metrics["loss"]))
    return np.array(losses), first_grads, program


runs = {
    "one device": train(single_device),
    "1f1b": train(pipelined, one_f_one_b),
    "interleaved": train(pipelined, interleaved),
}

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
styles = {"linewidth": 6, "alpha": 0.4}, {"linewidth": 2}, {"linewidth": 0, "marker": "o", "markersize": 4}
for (name, (losses, _, _)), style in zip(runs.items(), styles, strict=True):
    ax.plot(range(1, len(losses) + 1), losses, label=name, **style)
ax.set(xlabel="step", ylabel="loss before the step", ylim=(0, None))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# A schedule decides when something is computed, not what. The losses and gradients equal those of one device, up to
# rounding.

# %%
expected_losses, expected_grads, _ = runs["one device"]
for name in ("1f1b", "interleaved"):
    losses, grads, _ = runs[name]
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), grads, expected_grads)
    grad_error, loss_error = max(jax.tree.leaves(errors)), np.abs(losses - expected_losses).max()
    print(
        f"{name:12} largest relative error of the gradients: {grad_error:.1e}, "
        f"largest error of the losses over {len(losses)} steps: {loss_error:.1e}"
    )
    assert grad_error < 2e-6 and loss_error < 1e-4

# %% [markdown]
# ## Bytes on the wire
#
# `jp.audit` reads the compiled program and counts what each device computes and sends.

# %%
audits = {name: jp.audit(runs[name][2], mesh=pipelined.mesh) for name in ("1f1b", "interleaved")}
audits["1f1b"]

# %% [markdown]
# Neighbouring stages exchange activations and their gradients with `collective-permute`, twice per tick.
# Every stage holds a shard of the head, so all stages need the outputs of the last one: an `all-reduce` over `pipeline`
# distributes them, once per microbatch.
# The gradients are reduced over `data` once per step, whatever the number of microbatches.
#
# The interleaved schedule has more ticks, so it sends more bytes. This is the cost of its smaller bubble.

# %%
groups = sorted({(c.kind, c.axes) for audit in audits.values() for c in audit.collectives})
rows = ""
for kind, axes in groups:
    sums = [
        sum(c.total_wire_bytes for c in audit.collectives if (c.kind, c.axes) == (kind, axes))
        for audit in audits.values()
    ]
    rows += f"<tr><td>{kind}</td><td>{' × '.join(axes)}</td>{''.join(f'<td>{x / 2**10:,.1f}</td>' for x in sums)}</tr>"
HTML(
    "<table><tr><th>collective</th><th>mesh axes</th><th>KiB sent, 1f1b</th><th>KiB sent, interleaved</th></tr>"
    f"{rows}</table>"
)

# %% [markdown]
# ## What you have seen
#
# - A schedule is data. Its bubble and its stash are known before anything runs.
# - The stash of 1F1B does not grow with the number of microbatches. Interleaving makes the bubble smaller, but sends
#   more.
# - `zb_h1` and `zb_v` assume that each stage runs independently. A single program for all stages needs a different
#   schedule, such as `zb_uniform`.
# - If a custom schedule deadlocks, an error reports which stage waits for which.
# - `jp.pipeline.PipelineLoss` defines the stack of layers. Every schedule gives the gradients of one device, up to
#   rounding.
#
# ## Exercises
#
# 1. Draw `1f1b` with 32 microbatches. How large is the bubble, by the formula and by `jp.pipeline.simulate`?
# 2. Give the interleaved schedule four chunks. What becomes smaller, what larger?
# 3. Write a schedule of two stages whose second stage runs all forward passes first.
#
# **Answers.** 1. 3 / 35 = 8.6 % in both. 2. The bubble becomes smaller; the sends and the stash become larger.
# 3. `jp.pipeline.schedule(["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"], stages=2, microbatches=3)`, as
# GPipe does.
