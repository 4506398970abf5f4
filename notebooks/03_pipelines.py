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
# A deep model can be cut between its layers: the first device has the first layers, the next one has the next. These are the *stages* of a pipeline.
# A batch goes through in small parts, *microbatches*, so that all stages have something to do. At both ends some still stand idle. That is the *bubble*.
#
# In this notebook you draw schedules, write one of your own, and see what happens when its stages wait for each other.
# Then you train a small model on four stages, check its gradients against one device, and count what crosses the mesh.
# It needs no accelerator.

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
# A *schedule* says which stage does what, and when. It is data: nothing has to run to look at it.
#
# GPipe first does all forwards, then all backwards. Blue is forward, orange backward, white is the bubble. The numbers are microbatches.
# A backward takes twice as long as a forward: it has the gradients of its inputs and those of its weights to find.

# %%
STAGES, MICROBATCHES = 4, 8
gpipe = jp.pipeline.schedule("gpipe", STAGES, MICROBATCHES)
gpipe.draw()

# %% [markdown]
# What a forward has computed must be kept until its backward comes. That is the *stash*. GPipe keeps all eight microbatches.

# %%
print(gpipe)

# %% [markdown]
# 1F1B has the same bubble, but each backward comes as early as it can.
# So the stash does not grow with the microbatches: the first stage keeps at most 2 · 4 − 1 = 7 of them, be there 8 or 800.

# %%
one_f_one_b = jp.pipeline.schedule("1f1b", STAGES, MICROBATCHES)
one_f_one_b.draw()

# %%
for microbatches in (8, 16, 32):
    found = [max(jp.pipeline.schedule(name, STAGES, microbatches).stash) for name in ("gpipe", "1f1b")]
    print(f"{microbatches:2} microbatches: GPipe keeps {found[0]:2}, 1F1B {found[1]}")

# %% [markdown]
# The bubble is (S − 1) / (M + S − 1) for S stages and M microbatches. More microbatches make it smaller.
#
# So do shorter stages. *Interleaved* gives each stage two pieces of the model, one from its front and one from its back. Each microbatch goes round twice.
# That is the same work in steps half as long, and twice as many sends. The second pieces are pale.

# %%
interleaved = jp.pipeline.schedule("interleaved", STAGES, MICROBATCHES, chunks=2)
interleaved.draw()

# %% [markdown]
# A *zero bubble* schedule cuts the backward in half. Other stages wait for the gradients of inputs (orange), but nobody waits for those of weights (green),
# so these fill the gaps.

# %%
zero_bubble = jp.pipeline.schedule("zb_h1", STAGES, MICROBATCHES)
zero_bubble.draw(timing="stages")

# %% [markdown]
# That picture lets each stage go on as soon as it can, which papers assume. On TPUs all devices run *one* program, tick by tick:
# while some stages do a forward and others a backward, all take the time of both. For that, this order is a bad one.

# %%
zero_bubble.draw(timing="ticks")

# %% [markdown]
# `zb_uniform` is made for one program. Here are all of them, by both ways of counting.

# %%
asked = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_uniform": 1, "zb_h1": 1, "zb_v": 2}
rows = ""
for name, chunks in asked.items():
    one = jp.pipeline.schedule(name, STAGES, MICROBATCHES, chunks=chunks)
    bubbles = "".join(f"<td>{jp.pipeline.simulate(one, timing=how).bubble:.1%}</td>" for how in ("ticks", "stages"))
    rows += f"<tr><td>{name}</td>{bubbles}<td>{max(one.held) / chunks:g}</td></tr>"
HTML(
    "<table><tr><th>schedule</th><th>bubble, one program</th><th>bubble, each stage for itself</th>"
    f"<th>microbatches kept</th></tr>{rows}</table>"
)

# %% [markdown]
# ## An order of your own
#
# Write down for each stage what it does: `F0` is the forward of microbatch 0, `B0` its backward.

# %%
own = jp.pipeline.schedule(["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"], stages=2, microbatches=3)
print(own.show())
own.draw()

# %% [markdown]
# Now make a mistake. Stage 0 wants to do the backward of 0 before it goes on. But stage 1 wants to see microbatch 1 first.
# Neither can go on, and on real devices the program would hang. Here it is an error, and nothing has run.

# %%
try:
    jp.pipeline.schedule(["F0 B0 F1 B1", "F0 F1 B0 B1"], stages=2, microbatches=2)
except jp.errors.ScheduleError as error:
    print(error)

# %% [markdown]
# ## A model in three parts
#
# A pipeline must know which part of a model is the stack of layers, and what comes before and after it. `jp.pipeline.PipelineLoss` is a loss that says so.
#
# The model: an embedding, eight equal layers, and a head. The layers' weights are stacked along a first dim, `layers`.
# The task: say which word comes next, where words follow each other by a fixed table.

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


def before(model, batch):
    # A product in the place of a lookup: it can be split over words and over what they are looked up for.
    return jax.nn.one_hot(batch["tokens"], WORDS) @ model["words"]


def layer(block, x, side):
    return x + jnp.tanh(x @ block["up"]) @ block["down"]


def after(model, x, batch):
    logits = x @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


loss = jp.pipeline.PipelineLoss(layers="blocks", embed=before, layer=layer, head=after)

# %%
rng = np.random.default_rng(0)
tokens = rng.integers(WORDS, size=(ROWS, SEQ)).astype(np.int32)
batch = {"tokens": tokens, "targets": rng.permutation(WORDS).astype(np.int32)[tokens]}

# %% [markdown]
# ## Four stages, two devices each
#
# The layout has one rule for the pipeline: `layers` goes to the axis `pipeline`. So do the rows of the vocabulary, so that no stage holds the embedding or the
# head whole. Each microbatch is split over `data`.

# %%
rules = jp.Rules(batch="data", seq=None, embed=None, mlp=None, vocab="pipeline", layers="pipeline")
piped = jp.Layout(jp.MeshSpec(pipeline=4, data=2).build(), rules)
tx = optax.adam(1e-2)
jp.explain(piped, make_model, tx)

# %% [markdown]
# Called, `jp.pipeline.PipelineLoss` is an ordinary loss: the layers run one after the other. So one device can use it too.

# %%
alone = jp.Layout(jp.MeshSpec(pipeline=1, data=1).build(jax.devices()[:1]), rules)
untrained = jp.init(alone, make_model, tx, seed=0)
print(
    f"loss before training: {loss(untrained.params, batch):.3f}, of guessing among {WORDS} words: {np.log(WORDS):.3f}"
)

# %% [markdown]
# `jp.train_step` takes the schedule as `pipeline=`. Everything else is as without one.


# %%
def train(layout, pipeline=None, steps=12):
    with layout:
        given = {name: jp.shard_array(layout, x, "batch", "seq") for name, x in batch.items()}
        state = jp.init(layout, make_model, tx, seed=0)
        step = jp.train_step(layout, loss, pipeline=pipeline, return_grads=True, donate=False)
        program = step.lower(state, given).compile()
        losses, first = [], None
        for _ in range(steps):
            state, metrics = program(state, given)
            first = first if first is not None else jax.device_get(metrics["grads"])
            losses.append(float(metrics["loss"]))
    return np.array(losses), first, program


runs = {"one device": train(alone), "1f1b": train(piped, one_f_one_b), "interleaved": train(piped, interleaved)}

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
styles = {"linewidth": 6, "alpha": 0.4}, {"linewidth": 2}, {"linewidth": 0, "marker": "o", "markersize": 4}
for (name, (losses, _, _)), style in zip(runs.items(), styles, strict=True):
    ax.plot(range(1, len(losses) + 1), losses, label=name, **style)
ax.set(xlabel="step", ylabel="loss before the step", ylim=(0, None))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# A schedule decides when something is computed, not what. Losses and gradients are those of one device, up to rounding.

# %%
want_losses, want, _ = runs["one device"]
for name in ("1f1b", "interleaved"):
    losses, grads, _ = runs[name]
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), grads, want)
    gap, drift = max(jax.tree.leaves(gaps)), np.abs(losses - want_losses).max()
    print(f"{name:12} gradients differ by {gap:.1e}, relative; losses of {len(losses)} steps by {drift:.1e}")
    assert gap < 2e-6 and drift < 1e-4

# %% [markdown]
# ## What crosses the mesh
#
# `jp.audit` reads the compiled program and counts what each device computes and sends.

# %%
audits = {name: jp.audit(runs[name][2], mesh=piped.mesh) for name in ("1f1b", "interleaved")}
audits["1f1b"]

# %% [markdown]
# Between neighbours go activations and their gradients: these are the `collective-permute`s, two for each tick.
# As every stage has a part of the head, the last stage's results go to all of them: an `all-reduce` over `pipeline` for each tick.
# Over `data` go gradients, once a step, however many microbatches there are.
#
# Interleaved has more ticks, so it sends more: that is the price of its smaller bubble.

# %%
names = sorted({(c.kind, c.axes) for found in audits.values() for c in found.collectives})
rows = ""
for kind, axes in names:
    sums = [
        sum(c.total_wire_bytes for c in found.collectives if (c.kind, c.axes) == (kind, axes))
        for found in audits.values()
    ]
    rows += f"<tr><td>{kind}</td><td>{' × '.join(axes)}</td>{''.join(f'<td>{x / 2**10:,.1f}</td>' for x in sums)}</tr>"
HTML(f"<table><tr><th>kind</th><th>over</th><th>KiB sent, 1f1b</th><th>KiB sent, interleaved</th></tr>{rows}</table>")

# %% [markdown]
# ## What you have seen
#
# - A schedule is data. Its bubble and its stash are known before anything runs.
# - 1F1B keeps as much whatever the number of microbatches. Interleaving makes the bubble smaller, for more sends.
# - Zero-bubble orders are for stages that go on by themselves. One program for all wants another order.
# - An order that waits for itself is an error that names who waits for whom.
# - `jp.pipeline.PipelineLoss` names the layers. With it any schedule gives the gradients of one device.
