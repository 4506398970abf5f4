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
# # Experts
#
# In a *mixture of experts*, a router sends each token to a few of many small networks, the experts. Only those compute,
# so the model has many weights and needs few operations. On many devices each one holds some of the experts, and the
# tokens travel.
#
# In this notebook you route tokens, watch the load of the experts, train with and without balancing, and count what the
# devices send.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/07_experts.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import display

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## Eight experts on four devices
#
# The rule for the dim `experts` splits the experts over the mesh axis `expert`: two on each device. Change the number
# of experts, or how many each token takes.

# %%
EXPERTS, CHOICES, EMBED, INNER = 8, 2, 16, 32
rules = jp.Rules(batch=("data", "expert"), seq=None, embed=None, experts="expert", expert_mlp=None)
layout = jp.Layout(jp.MeshSpec(data=2, expert=4).build(), rules)
DIMS = {"gate": ("experts", "embed", "expert_mlp"), "up": ("experts", "embed", "expert_mlp")}
DIMS["down"] = ("experts", "expert_mlp", "embed")
jp.analysis.draw_shards(layout, *DIMS["up"], shape=(EXPERTS, EMBED, INNER), role="params", path="up")

# %% [markdown]
# ## The model
#
# `jp.experts` computes the experts of every token: rows travel to the devices of their experts and return. No token is
# dropped. The loss may add a term that balances the experts.

# %%
router = jp.moe.Router(experts=EXPERTS, k=CHOICES)


def make_model(key):
    keys = jax.random.split(key, 4)
    shapes = {"gate": (EXPERTS, EMBED, INNER), "up": (EXPERTS, EMBED, INNER), "down": (EXPERTS, INNER, EMBED)}
    weights = {
        name: jp.tag(jax.random.normal(k, shape) / np.sqrt(shape[1]), *DIMS[name])
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return weights | {"router": jp.tag(0.5 * jax.random.normal(keys[3], (EMBED, EXPERTS)), "embed", None)}


def loss_of(balance):
    def loss_fn(model, batch):
        routing = router(batch["x"] @ model["router"])
        y, dropped = jp.experts(batch["x"], routing, *((model[name], DIMS[name]) for name in ("gate", "up", "down")))
        error = jnp.mean((y - batch["y"]) ** 2)
        return error + balance * jp.moe.load_balance_loss(routing), jp.moe.routing_metrics(routing, dropped)

    return loss_fn


# %% [markdown]
# The data prefers some experts: most tokens lie in one direction.

# %%
rng = np.random.default_rng(0)
common = 1.5 * rng.normal(size=EMBED)
x = (common + rng.normal(size=(16, 8, EMBED))).astype(np.float32)
batch = {"x": x, "y": np.tanh(x[..., ::-1])}


def load(model, batch):
    """How many tokens each expert receives, relative to the mean."""
    chosen = router(jnp.asarray(batch["x"]) @ model["router"]).experts
    counts = np.bincount(np.asarray(chosen).ravel(), minlength=EXPERTS)
    return counts / counts.mean()


# %% [markdown]
# ## Train without and with balancing


# %%
def train(balance, layout=layout, steps=30):
    state = jp.init(layout, make_model, optax.adam(1e-2), seed=0)
    step = jp.train_step(layout, loss_of(balance))
    heaviest, losses = [], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        heaviest.append(float(metrics["expert_load_max"]))
        losses.append(float(metrics["loss"]))
    return jax.device_get(state.params), heaviest, losses


plain, plain_load, plain_losses = train(0.0)
balanced, balanced_load, _ = train(0.1)

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 2.8), layout="constrained")
for ax, (name, params) in zip(axes, {"without balancing": plain, "with balancing": balanced}.items(), strict=False):
    colors = [f"C{expert // (EXPERTS // 4)}" for expert in range(EXPERTS)]
    ax.bar(range(EXPERTS), load(params, batch), color=colors)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(title=name, xlabel="expert (colour: its device)", ylabel="tokens / mean", ylim=(0, 4))
axes[2].plot(plain_load, label="without")
axes[2].plot(balanced_load, label="with")
axes[2].set(title="the most chosen expert", xlabel="step", ylabel="tokens / mean", ylim=(0, None))
axes[2].legend(frameon=False)
plt.show()

# %% [markdown]
# A device with twice the mean of tokens makes all the others wait. Balancing matters more for time than for the loss.
#
# ## The same as on one device

# %%
single = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), rules)
_, _, one = train(0.0, single, steps=5)
np.testing.assert_allclose(plain_losses[:5], one, rtol=1e-5)
print("largest relative difference:", f"{np.abs(np.array(plain_losses[:5]) / one - 1).max():.0e}")

# %% [markdown]
# ## What the devices send
#
# The compiled step, read by `jp.audit`. The axis `expert` carries the tokens, `data` and `expert` the gradients.

# %%
state = jp.abstract_state(layout, make_model, optax.adam(1e-2))
audit = jp.audit(jp.train_step(layout, loss_of(0.1)).lower(state, batch).compile(), mesh=layout.mesh)
display(audit)

# %%
sums = {}
for one in audit.collectives:
    name = f"{one.kind} over {' × '.join(one.axes)}"
    sums[name] = sums.get(name, 0) + one.total_wire_bytes / 2**10
sums = dict(sorted(sums.items(), key=lambda item: -item[1])[:6])
figure, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
ax.barh(list(sums), list(sums.values()), color="tab:orange")
ax.invert_yaxis()
ax.set(xlabel="KiB that one device sends in a step")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. Set `CHOICES = 1`. What happens to the bytes?
# 2. Split each expert over two devices instead: an axis `model` of size 2, and the rule `expert_mlp="model"`.
# 3. Give each expert room for only 1.25 times the mean. Which metric tells you what was lost?
#
# **Answers.** 1. Little: the tokens are gathered over `expert`, whatever they choose. 2. `jp.MeshSpec(expert=4, model=2)`; the
# results stay the same up to rounding. 3. A capacity, in [the guide](../docs/guides/experts.md); the metric
# `dropped_fraction` is then above 0.
