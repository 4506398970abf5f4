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
# # Parameter servers
#
# In one SPMD program all devices take each step together. With *parameter servers* they need not: servers hold the
# parameters, and each worker pulls them, computes a step and pushes its gradient when it is ready. That suits workers
# of unequal speed, slow links, and tables that no worker could hold.
#
# In this notebook you train with servers, slow one worker down, allow it to be stale, and let workers talk less often.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/09_parameter_servers.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxpar as jp

ps = jp.parameter_server
print(f"{jax.device_count()} device")

# %% [markdown]
# ## What to train
#
# A `TrainingProgram` names the model, the loss, the optimizer and the data as functions: on a cluster every worker
# calls them in its own process. `batches(worker, workers)` returns the batch of each step, the same in each call,
# because a worker that was killed computes its step again. The last worker takes four times as long as the others.

# %%
WORKERS, STEPS, PAUSE, SLOWER = 4, 24, 0.03, 4
TEACHER = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def examples(seed, rows):
    x = np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ TEACHER).argmax(1)}


def batches(worker, workers):
    def batch(step):
        time.sleep(PAUSE * (SLOWER if worker == workers - 1 else 1))  # stands for compute
        return examples((worker, step), 16)

    return batch


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


program = ps.TrainingProgram(
    layout=lambda: jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch=None, unannotated="replicate")),
    make_model=lambda key: nnx.Linear(8, 3, rngs=nnx.Rngs(key)),
    loss_fn=loss_fn,
    tx=optax.sgd(0.3, momentum=0.8),
    batches=batches,
)

# %% [markdown]
# ## Synchronous: as on one device
#
# Two servers share the parameters. In this mode they wait for all workers, and apply the mean gradient once. The
# threads of this process play servers and workers; leave `cluster` out to run them on Ray.


# %%
def train(config, steps=STEPS):
    arrived = {}
    note = lambda worker, step, figures: arrived.setdefault(worker, []).append(time.perf_counter())
    with (
        tempfile.TemporaryDirectory() as folder,
        ps.ServerRun(program, config, steps=steps, folder=folder, cluster="threads", on_report=note) as run,
    ):
        while run.poll(0.01):
            pass
        result = run.wait()
    fast = [(len(at) - 1) / (at[-1] - at[0]) for worker, at in arrived.items() if worker < WORKERS - 1]
    return result, np.mean(fast)


def on_one_device(steps):
    layout = program.layout()
    state = jp.init(layout, program.make_model, program.tx)
    step = jp.train_step(layout, loss_fn)
    for n in range(steps):
        parts = [examples((worker, n), 16) for worker in range(WORKERS)]
        state, _ = step(state, {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")})
    return np.asarray(state.params["kernel"])


result, _ = train(ps.ServerConfig(servers=2, workers=WORKERS), steps=6)
difference = np.abs(result.params["params/kernel"] - on_one_device(6)).max()
print(f"largest difference from one device: {difference:.0e}")
assert difference < 1e-5

# %% [markdown]
# ## Do not wait for the slow one
#
# With `stale_synchronous`, servers apply each gradient when it arrives, and a worker waits only while it is more than
# `staleness` steps ahead of the slowest one. `asynchronous` has no bound. All runs make the same number of pushes;
# what changes is how old the parameters are from which a gradient was computed.

# %%
BOUNDS = (0, 2, 8, None)
held_out = examples(12345, 512)


def held_out_loss(params):
    logits = held_out["x"] @ params["params/kernel"] + params["params/bias"]
    return float(optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), held_out["y"]).mean())


rates, losses, staleness = [], [], []
for bound in BOUNDS:
    mode = {"mode": "asynchronous"} if bound is None else {"mode": "stale_synchronous", "staleness": bound}
    result, rate = train(ps.ServerConfig(servers=2, workers=WORKERS, **mode))
    rates.append(rate)
    losses.append(held_out_loss(result.params))
    staleness.append(max(result.staleness))
    assert bound is None or staleness[-1] <= bound
    print(f"bound {bound}: staleness at most {staleness[-1]}, held-out loss {losses[-1]:.3f}")

# %%
names = ["none" if bound is None else str(bound) for bound in BOUNDS]
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
axes[0].plot(names, rates, marker="o")
axes[0].set(title="speed of a fast worker", xlabel="bound of the staleness", ylabel="steps/s", ylim=(0, None))
axes[1].plot(names, losses, marker="o", color="tab:orange")
axes[1].set(title="after the same number of pushes", xlabel="bound of the staleness", ylabel="held-out loss")
axes[1].set_ylim(0, 1.3 * max(losses))
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Fast workers gain their head start once; behind a worker that is always slower, only `asynchronous` keeps them at
# full speed. The loss hardly changes here, because only the slow worker's few gradients are old. With a higher
# learning rate it does (exercise 2).
#
# ## Talk less often
#
# With `local_sgd`, each worker takes `sync_every` steps with an optimizer of its own and pushes how its parameters
# changed. The servers apply the mean change with an outer optimizer (DiLoCo), here as it is: rate 1, no momentum.
# Eight bits for each number make it smaller again.

# %%
EVERY = (1, 4, 12)
rows = []
for every in EVERY:
    for compression in (None, "int8"):
        outer = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
        config = ps.ServerConfig("local_sgd", 2, WORKERS, sync_every=every, compression=compression, **outer)
        result, _ = train(config)
        rows.append((every, compression, result.reports[0].traffic.pushed, held_out_loss(result.params)))

# %%
figure, ax = plt.subplots(figsize=(5, 2.8), layout="constrained")
for compression, marker in ((None, "o"), ("int8", "s")):
    pushed, loss = zip(*[row[2:] for row in rows if row[1] == compression], strict=True)
    ax.plot(pushed, loss, marker=marker, label=compression or "fp32")
for every, _, pushed, loss in rows[::2]:
    ax.annotate(f" every {every}", (pushed, loss), va="bottom")
ax.set(xscale="log", xlabel="bytes that a worker pushed", ylabel="held-out loss")
ax.set_ylim(0, 1.3 * max(row[3] for row in rows))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# This problem is so small that the loss hardly depends on how often workers talk. That of a language model does; see
# [the measured figures](../docs/measured/parameter_server.md).
#
# ## Exercises
#
# 1. Set `SLOWER = 1`. What does a bound gain now?
# 2. Train with `optax.sgd(1.0, momentum=0.9)`. Is a bound of 4 still free?
# 3. Add a worker during a run: use `ps.ServerRun` as in `train`, and call `run.add_worker()`.
#
# **Answers.** 1. Little: nobody waits for long, and all runs are nearly as fast as the asynchronous one. 2. No: the
# loss is about 0.15 instead of 0.14. 3. The new worker joins at the next step; see [the
# guide](../docs/guides/parameter_server.md), also for tables larger than the memory of a worker.
