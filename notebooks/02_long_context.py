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

# %% [markdown]
# # Long context
#
# A sequence of a million tokens does not fit on one device. So it is split: each device has some of the tokens.
# But in attention every token looks at others, and they may lie anywhere.
#
# In this notebook you draw who computes what, see why the order of the tokens matters, and let `jaxpar` pick an implementation.
# Then you count the bytes that each one sends, and check that all of them give the same result.
# It needs no accelerator.

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
# `jp.Mask` says which keys a query sees. It is a rule on positions, not an array: nothing of size sequence × sequence is ever built.
#
# Here is the causal mask over four devices that each have one stretch of the sequence.
# A row is a block of queries, a column a block of keys, and the colour is that of the device that has the queries.
# Dark tiles are seen as a whole, lighter ones in part. White ones are not computed.

# %%
causal = jp.Mask(causal=True)
jp.context.draw_mask(causal, seq=4096, ways=4, order="contiguous", block=128)

# %% [markdown]
# The work is uneven: the last device computes seven times as much as the first.
#
# In a *ring* keys and values go from neighbour to neighbour. In each hop all wait for the slowest device.
# The sum of these slowest ones is the *critical path*. `jp.context.balance` compares it with the mean.

# %%
print(jp.context.balance(causal, 4096, 4, "contiguous", block=128).report())

# %% [markdown]
# ## Zigzag
#
# Cut the sequence into twice as many pieces as there are devices. Give each device one piece from the front and its mirror image from the back.

# %%
jp.context.draw_mask(causal, seq=4096, ways=4, order="zigzag", block=128)

# %% [markdown]
# Now all have the same work in every hop. *Striped* gives each device every n-th token, which is nearly as even.
# But each of its tiles spans the tokens of all devices, so more of them are masked in part, and a window leaves out fewer.

# %%
for order in ("contiguous", "striped", "zigzag"):
    found = jp.context.balance(causal, 4096, 4, order, block=128)
    print(f"{order:10}  critical path {found.ratio:.3f} × the mean, of computed tiles {found.tile_ratio:.3f} ×")

# %% [markdown]
# Masks can say more. This one has a window of 700 tokens and a prefix of 256 that all see.
# Tiles outside are not visited, and a ring skips the hops that bring nothing.

# %%
jp.context.draw_mask(jp.Mask(causal=True, window=700, prefix=256), seq=4096, ways=4, order="contiguous", block=128)

# %% [markdown]
# ## Packed documents
#
# Training rows often hold several documents, and a token sees its own document only.
# Zigzag evens out one triangle. Here there are many, of different sizes.

# %%
documents = np.repeat(range(6), [300, 1900, 120, 1000, 80, 696])
print(jp.context.balance(causal, 4096, 4, "zigzag", block=64, segment_ids=documents).report())

# %% [markdown]
# `jp.context.balanced_packing` cuts the row into more pieces and gives them to the devices so that they come out even.
# What it returns are the positions of the tokens, as they lie: `tokens[:, order]` brings them there, and `jp.attention(..., order=order)` is told.

# %%
order = jp.context.balanced_packing(documents, 4, chunks=16)
print(jp.context.balance(causal, 4096, 4, order, block=64, segment_ids=documents).report())
jp.context.draw_mask(causal, seq=4096, ways=4, order=order, block=64, segment_ids=documents)

# %% [markdown]
# ## Attention under a layout
#
# `jp.attention` looks at the layout. Here the rule for `seq` splits the sequence over eight devices: four of `context` times two of `ulysses`.

# %%
layout = jp.Layout(
    jp.MeshSpec(context=4, ulysses=2).build(),
    jp.Rules(batch=None, seq=("context", "ulysses"), heads=None, kv_heads=None, head_dim=None),
)
Q, KV = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
SEQ, HEADS, HEAD_DIM = 256, 8, 16

# %% [markdown]
# There are several ways to bring queries and keys together:
#
# - `gather` collects all keys and values on every device.
# - `ring` passes them from neighbour to neighbour, while each device computes with those that it has.
# - `ulysses` exchanges sequence for heads: each device gets all tokens of some heads, and gives the result back.
# - `hybrid` exchanges over one mesh axis and goes round over the other.
#
# `auto` takes what takes the least time; of simulated devices nothing is known, and it takes what sends the least. `choice` tells why.


# %%
def why(kv_heads, asked="auto"):
    q = jax.ShapeDtypeStruct((1, SEQ, HEADS, HEAD_DIM), jnp.float32)
    k = jax.ShapeDtypeStruct((1, SEQ, kv_heads, HEAD_DIM), jnp.float32)
    spread = jp.context.QKVSharding(layout.resolve(Q, q.shape).axes, layout.resolve(KV, k.shape).axes)
    return jp.context.select_impl(asked, q, k, spread, layout.sizes), {
        impl: jp.context.bytes_sent(impl, q, k, spread, layout.sizes)
        for impl in ("ring", "gather", "ulysses", "hybrid")
    }


for kv_heads in (8, 2, 1):
    picked, _ = why(kv_heads)
    print(f"{HEADS} query heads, {kv_heads} for the keys: {picked.impl}\n    {picked.why}")

# %% [markdown]
# With as many key heads as query heads, a ring would carry much and an exchange of heads little.
# The fewer key heads there are, the less a ring carries. An exchange still moves all the queries.
#
# ## Bytes on the wire
#
# Those were estimates. Now compile each implementation, forward and backward, and read from the compiled program what it sends.

# %%
rng = np.random.default_rng(0)
shapes = {"q": (1, SEQ, HEADS, HEAD_DIM), "k": (1, SEQ, 8, HEAD_DIM), "v": (1, SEQ, 8, HEAD_DIM)}
x = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
split = tuple(jp.shard_array(layout, x[name], *dims) for name, dims in zip("qkv", (Q, KV, KV), strict=True))


def compiled(impl):
    def loss(q, k, v):
        out = jp.attention(q, k, v, impl=impl)
        return jnp.sum(out**2), out

    with layout:
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(*split).compile()


IMPLS = ("dense", "ring", "gather", "ulysses", "hybrid")
programs = {impl: compiled(impl) for impl in IMPLS}
audits = {impl: jp.audit(program, mesh=layout.mesh) for impl, program in programs.items()}

# %% [markdown]
# Each kind of collective for itself, for the ring.
# How many tiles a device visits depends on where it stands: the FLOPs are the mean of all devices. What is sent does not depend on it.

# %%
audits["ring"]

# %% [markdown]
# And all of them beside the estimate. Where there is a ring, tokens are brought into zigzag first and back after, which the estimate
# leaves out. `gather` sends less than estimated: the compiler sees that forward and backward gather the same, and gathers once.

# %%
_, expected = why(kv_heads=8)
rows = "".join(
    f"<tr><td>{impl}</td><td>{found.wire_bytes() / 2**10:,.0f}</td><td>{expected[impl] / 2**10:,.0f}</td>"
    f"<td>{', '.join(sorted({c.kind for c in found.collectives if c.total_wire_bytes > 100}))}</td></tr>"
    for impl, found in audits.items()
    if impl != "dense"
)
HTML(f"<table><tr><th>impl</th><th>KiB sent</th><th>KiB estimated</th><th>by</th></tr>{rows}</table>")

# %% [markdown]
# ## All are the same
#
# The results and the gradients of all equal those of the dense form, up to rounding.

# %%
(_, reference), gradients = programs["dense"](*split)
for impl in IMPLS[1:]:
    (_, out), found = programs[impl](*split)
    gap = max(float(jnp.abs(a - b).max()) for a, b in zip((out, *found), (reference, *gradients), strict=True))
    print(f"{impl:8} differs from dense by at most {gap:.1e}")
    assert gap < 1e-4

# %% [markdown]
# ## Time
#
# The devices here are simulated: they share this computer's cores, and no wire lies between them.
# So these times say what the work costs, and nothing of what sending costs. What a network would add is in the bytes above: do not choose by these times.


# %%
def seconds(program, runs=2):
    best = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(program(*split))
        best.append(time.perf_counter() - start)
    return min(best)


times = {impl: seconds(program) for impl, program in programs.items()}
rows = "".join(f"<tr><td>{impl}</td><td>{1e3 * t:.1f}</td></tr>" for impl, t in times.items())
HTML(f"<table><tr><th>impl</th><th>ms on simulated devices</th></tr>{rows}</table>")

# %% [markdown]
# ## What you have seen
#
# - A mask is a rule on positions. `jp.context.draw_mask` shows which device computes what, `jp.context.balance` how evenly.
# - Under a causal mask zigzag is even and contiguous is not. Packed documents want an order of their own.
# - Ring, gather, Ulysses and hybrid give the same result. They differ in what they send.
# - `auto` takes what takes the least time, or what sends the fewest bytes where nothing is known of the devices, and says why.
