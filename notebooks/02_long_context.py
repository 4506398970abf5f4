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
# # Long context
#
# A sequence of a million tokens does not fit on one device, so it is sharded: each device holds some of the tokens.
# But in attention every token attends to other tokens, and any device may hold them.
#
# In this notebook you draw which device computes what, see why the order of the tokens matters, and let `jaxpar` select
# an implementation of attention. Then you count the bytes that each implementation sends, and check that all of them
# give the same result.
# The notebook runs on a CPU, here or [in Colab](https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/notebooks/02_long_context.ipynb).
# In Colab, first run `!git clone -q https://github.com/jaxpar/jaxpar && pip install -q "./jaxpar[plots]"` and `%cd jaxpar/notebooks`.

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import HTML

import jaxpar as jp

jp.simulate_devices(8)
print(f"{jax.device_count()} devices")

# %% [markdown]
# ## A mask
#
# `jp.Mask` describes which keys a query attends to. It is a function of positions, not an array: `jaxpar` never
# allocates an array of size sequence × sequence.
#
# The picture shows the causal mask over four devices. Each device holds one contiguous chunk of the sequence.
# A row is a block of queries, and a column is a block of keys. The colour shows which device holds the queries.
# Dark tiles are unmasked, lighter tiles are partially masked, and white tiles are skipped.

# %%
causal = jp.Mask(causal=True)
jp.context.draw_mask(causal, seq=4096, num_shards=4, order="contiguous", block=128)

# %% [markdown]
# The work is unbalanced: the last device computes seven times as much as the first.
#
# In *ring attention*, each device passes keys and values to its neighbour. In each hop, all devices wait for the
# slowest one. The *critical path* adds up the work of the slowest device in each hop. `jp.context.balance` compares the
# critical path with the mean work per device.

# %%
print(jp.context.balance(causal, 4096, 4, "contiguous", block=128).report())

# %% [markdown]
# ## Zigzag
#
# Cut the sequence into twice as many chunks as there are devices. Give each device one chunk from the front and its
# mirror image from the back.

# %%
jp.context.draw_mask(causal, seq=4096, num_shards=4, order="zigzag", block=128)

# %% [markdown]
# Now all devices have the same work in every hop. The *striped* order gives each of n devices every n-th token, which
# is nearly as balanced. But each striped tile spans the tokens of all devices. Therefore more tiles are partially
# masked, and a window skips fewer tiles.

# %%
for order in ("contiguous", "striped", "zigzag"):
    work = jp.context.balance(causal, 4096, 4, order, block=128)
    print(f"{order:10}  critical path {work.ratio:.3f} × the mean, in computed tiles {work.tile_ratio:.3f} ×")

# %% [markdown]
# Masks have more options. This mask has a window of 700 tokens, and a prefix of 256 tokens that every token attends to.
# `jaxpar` skips the tiles outside the mask, and a ring skips the hops in which all tiles are masked.

# %%
jp.context.draw_mask(
    jp.Mask(causal=True, window=700, prefix=256), seq=4096, num_shards=4, order="contiguous", block=128
)

# %% [markdown]
# ## Packed documents
#
# Training rows often contain several documents, and a token attends only to its own document.
# Zigzag balances a single causal triangle. Packed documents form many triangles of different sizes.

# %%
documents = np.repeat(range(6), [300, 1900, 120, 1000, 80, 696])
print(jp.context.balance(causal, 4096, 4, "zigzag", block=64, segment_ids=documents).report())

# %% [markdown]
# `jp.context.balanced_packing` cuts the row into more chunks and distributes them so that all devices get nearly equal
# work. It returns the position of each token in the new order. Reorder the tokens with `tokens[:, order]`, and pass the
# order to `jp.attention(..., order=order)`.

# %%
order = jp.context.balanced_packing(documents, 4, chunks=16)
print(jp.context.balance(causal, 4096, 4, order, block=64, segment_ids=documents).report())
jp.context.draw_mask(causal, seq=4096, num_shards=4, order=order, block=64, segment_ids=documents)

# %% [markdown]
# ## Attention under a layout
#
# `jp.attention` reads the sharding from the layout. Here the rule for `seq` shards the sequence over eight devices: the
# mesh axis `context` of size 4, and the mesh axis `ulysses` of size 2.

# %%
layout = jp.Layout(
    jp.MeshSpec(context=4, ulysses=2).build(),
    jp.Rules(batch=None, seq=("context", "ulysses"), heads=None, kv_heads=None, head_dim=None),
)
Q, KV = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
SEQ, HEADS, HEAD_DIM = 256, 8, 16

# %% [markdown]
# `jaxpar` has several implementations of attention over a sharded sequence:
#
# - `gather` all-gathers the keys and values on every device.
# - `ring` passes keys and values from neighbour to neighbour, while each device computes with the ones that it holds.
# - `ulysses` exchanges sequence for heads with an all-to-all: each device gets all tokens of some heads. A second
#   all-to-all returns the results.
# - `hybrid` exchanges heads over one mesh axis and runs a ring over the other.
#
# `auto` selects the fastest implementation by a cost model. The cost model has no hardware data for simulated devices,
# so here `auto` selects the implementation that sends the fewest bytes. `jp.context.select_impl` reports the reason.


# %%
def select(kv_heads, impl="auto"):
    q = jax.ShapeDtypeStruct((1, SEQ, HEADS, HEAD_DIM), jnp.float32)
    k = jax.ShapeDtypeStruct((1, SEQ, kv_heads, HEAD_DIM), jnp.float32)
    spread = jp.context.QKVSharding(layout.resolve(Q, q.shape).axes, layout.resolve(KV, k.shape).axes)
    estimates = {
        name: jp.context.bytes_sent(name, q, k, spread, layout.sizes)
        for name in ("ring", "gather", "ulysses", "hybrid")
    }
    return jp.context.select_impl(impl, q, k, spread, layout.sizes), estimates


for kv_heads in (8, 2, 1):
    selected, _ = select(kv_heads)
    print(f"query heads {HEADS}, key heads {kv_heads}: {selected.impl}\n    {selected.why}")

# %% [markdown]
# With as many key heads as query heads, a ring sends many bytes and an exchange of heads sends few.
# With fewer key heads, a ring sends fewer bytes. An exchange of heads always sends all the queries.
#
# ## Bytes on the wire
#
# Those numbers are estimates. Now compile the forward and backward pass of each implementation, and count the bytes
# that the compiled program sends.

# %%
rng = np.random.default_rng(0)
shapes = {"q": (1, SEQ, HEADS, HEAD_DIM), "k": (1, SEQ, 8, HEAD_DIM), "v": (1, SEQ, 8, HEAD_DIM)}
x = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
sharded = tuple(jp.shard_array(layout, x[name], *dims) for name, dims in zip("qkv", (Q, KV, KV), strict=True))


def compiled(impl):
    def loss(q, k, v):
        out = jp.attention(q, k, v, impl=impl)
        return jnp.sum(out**2), out

    with layout:
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(*sharded).compile()


IMPLS = ("dense", "ring", "gather", "ulysses", "hybrid")
programs = {impl: compiled(impl) for impl in IMPLS}
audits = {impl: jp.audit(program, mesh=layout.mesh) for impl, program in programs.items()}

# %% [markdown]
# `jp.audit` lists the collectives of the ring, grouped by kind and origin.
# The number of tiles that a device computes depends on its rank, so the FLOPs are the mean over all devices. The bytes
# sent are the same for every rank.

# %%
audits["ring"]

# %% [markdown]
# The next table compares the bytes of each implementation with the estimate. `ring`, `hybrid` and `gather` also permute
# the tokens into zigzag order and back, which the estimate does not include.

# %%
_, estimates = select(kv_heads=8)
rows = "".join(
    f"<tr><td>{impl}</td><td>{audit.wire_bytes() / 2**10:,.0f}</td><td>{estimates[impl] / 2**10:,.0f}</td>"
    f"<td>{', '.join(sorted({c.kind for c in audit.collectives if c.total_wire_bytes > 100}))}</td></tr>"
    for impl, audit in audits.items()
    if impl != "dense"
)
HTML(f"<table><tr><th>impl</th><th>KiB sent</th><th>KiB estimated</th><th>collectives</th></tr>{rows}</table>")

# %% [markdown]
# ## The same results
#
# Every implementation computes the same outputs and gradients as dense attention, up to rounding.

# %%
(_, dense_out), dense_grads = programs["dense"](*sharded)
for impl in IMPLS[1:]:
    (_, out), grads = programs[impl](*sharded)
    pairs = zip((out, *grads), (dense_out, *dense_grads), strict=True)
    max_error = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    print(f"{impl:8} differs from dense by at most {max_error:.1e}")
    assert max_error < 1e-4

# %% [markdown]
# ## Time
#
# Simulated devices share the cores of this computer, and no network connects them.
# These times therefore measure compute, not communication. Do not select an implementation by these times: on real
# devices, sending the bytes above takes additional time.


# %%
def seconds(program, runs=2):
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(program(*sharded))
        times.append(time.perf_counter() - start)
    return min(times)


times = {impl: seconds(program) for impl, program in programs.items()}
rows = "".join(f"<tr><td>{impl}</td><td>{1e3 * t:.1f}</td></tr>" for impl, t in times.items())
HTML(f"<table><tr><th>impl</th><th>ms on simulated devices</th></tr>{rows}</table>")

# %% [markdown]
# ## What you have seen
#
# - A mask is a function of positions. `jp.context.draw_mask` shows which device computes what, and
#   `jp.context.balance` shows how balanced the work is.
# - Under a causal mask, the zigzag order is balanced and the contiguous order is not. Packed documents need a custom
#   order.
# - Ring, gather, Ulysses and hybrid give the same result. They differ in the bytes that they send.
# - `auto` selects the fastest implementation, or the one that sends the fewest bytes if the hardware is unknown. It
#   also reports the reason.
#
# ## Exercises
#
# 1. Draw the causal mask over eight devices, in zigzag order. Is it still balanced?
# 2. Set a window of 700 tokens and compare the orders again. Which one skips the most tiles?
# 3. Which implementation is selected for four key heads, and why?
#
# **Answers.** 1. Yes: `jp.context.balance(causal, 4096, 8, "zigzag", block=128).ratio` is close to 1. 2. `contiguous`:
# neighbouring tokens are on one device, so whole hops fall outside the window. 3. `select(4)[0]` has the name,
# and `select(4)[0].why` the bytes of each.
