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
# # Checkpoints and faults
#
# Machines fail, disks flip bits, and the next job gets another number of devices. In this notebook you save a run,
# stop it in the middle, continue it on half of the devices, damage a checkpoint, and see what happens.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/08_checkpoints.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpar as jp

jp.simulate_devices(8)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A small run

# %%
STEPS, EVERY = 24, 6


def make_model(key):
    up, down = jax.random.split(key)
    return {
        "up": jp.tag(jax.random.normal(up, (16, 64)) / 4, "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (64, 16)) / 8, "mlp", "embed"),
    }


def loss_fn(model, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ model["up"]) @ model["down"] - batch["y"]) ** 2)


def batch_of(number):
    x = np.random.default_rng(number).normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, ::-1])}


rules = jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
eight = jp.Layout(jp.MeshSpec(data=4, model=2).build(), rules)
tx = optax.adam(3e-3)


def run(layout, state, start, stop, manager=None):
    step, losses = jp.train_step(layout, loss_fn), []
    for number in range(start, stop):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
        if manager is not None and (number + 1) % EVERY == 0:
            manager.save(number + 1, state, layout=layout)
    return state, losses


# %% [markdown]
# First without any interruption, as a reference. Then with checkpoints, and "killed" after 15 steps: steps 13 to 15 are
# lost, because the newest checkpoint is that of step 12.

# %%
_, reference = run(eight, jp.init(eight, make_model, tx), 0, STEPS)

with jp.CheckpointManager(folder, keep=3) as manager:
    _, before = run(eight, jp.init(eight, make_model, tx), 0, 15, manager)
print("on disk:", sorted(path.name for path in folder.iterdir() if path.name.isdigit()))

# %% [markdown]
# ## Continue, on the same devices and on others
#
# `restore_latest` gives the newest undamaged step, sharded for any layout.

# %%
LAYOUTS = {
    "the same 8 devices": eight,
    "4 devices": jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), rules),
    "1 device": jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), rules),
}
after = {}
for name, layout in LAYOUTS.items():
    with jp.CheckpointManager(folder, keep=3) as manager:
        found = manager.restore_latest(jp.abstract_state(layout, make_model, tx))
    _, after[name] = run(layout, found.state, found.step, STEPS)
    difference = np.abs(np.array(after[name]) - reference[found.step :]).max()
    print(f"{name:20} from step {found.step}: losses differ from the reference by at most {difference:.0e}")

# %% [markdown]
# On the same devices the losses are equal to the last bit. On others, sums are added in another order.

# %%
assert after["the same 8 devices"] == reference[12:]
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(range(1, STEPS + 1), reference, color="lightgray", linewidth=6, label="never interrupted")
ax.plot(range(1, 16), before, color="tab:blue", label="until the kill")
for style, (name, losses) in zip(("o", "x", "+"), after.items(), strict=True):
    ax.plot(range(13, STEPS + 1), losses, style, markersize=6, mfc="none", label=f"continued on {name}")
ax.axvline(15.3, color="tab:red", linestyle="--", linewidth=1)
ax.text(15.4, max(reference), "killed", color="tab:red", va="top")
ax.set(xlabel="step", ylabel="loss")
ax.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## A flipped bit
#
# Every piece of every tensor has a checksum, computed from the values in memory before they were written. Flip one bit
# in the newest checkpoint:

# %%
file = max((path for path in (folder / "12" / "arrays" / "params.up").iterdir()), key=lambda path: path.stat().st_size)
data = bytearray(file.read_bytes())
data[len(data) // 2] ^= 1
file.write_bytes(bytes(data))

try:
    jp.restore(folder / "12", jp.abstract_state(eight, make_model, tx))
except jp.errors.DamagedError as error:
    print(str(error).replace(str(folder), "runs/one"))

# %% [markdown]
# The manager passes over the damaged step, says so, and takes the one before:

# %%
told = []
with jp.CheckpointManager(folder, keep=3, tell=told.append) as manager:
    found = manager.restore_latest(jp.abstract_state(eight, make_model, tx))
print(f"restored step {found.step}")
print("\n".join(told).replace(str(folder), "runs/one"))

# %% [markdown]
# ## From the command line
#
# `jaxpar train` does all of this with one line of configuration, and `jaxpar doctor` checks every byte of a run:
#
# ```yaml
# checkpoint: {save_interval_steps: 100, keep: 3, resume: auto}
# ```
#
# ```sh
# jaxpar doctor --checkpoint runs/one/checkpoints
# ```
#
# ## Exercises
#
# 1. Restore onto a layout without `model`. Does anything change in the code?
# 2. Delete `manifest.json` of the newest step. What does `restore_latest` do?
# 3. Damage every step.
#
# **Answers.** 1. No: the layout of `jp.abstract_state` decides. 2. A folder without a manifest is not a checkpoint; the
# manager says so and takes an older step. 3. It raises `DamagedError`, because a run must not silently start anew.
#
# More: [guide](../docs/guides/checkpoints.md), [guarantees](../docs/reference/checkpoints.md),
# [kills and damage measured](../docs/measured/reliability.md).
