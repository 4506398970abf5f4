"""Programs with FLOPs and bytes known by hand, for the auditor's tests and fixtures, and the formulas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.models.llama import Llama, LlamaConfig
from jaxpar.models.llama.layers import Block, RMSNorm, TokenInfo, rope_table
from jaxpar.models.losses import next_token_loss
from jaxpar.nnx import axes
from jaxpar.utils.scope_facts import expected_rows

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"


class UnrolledLlama(nnx.Module):
    """A Llama whose layers are a Python loop."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def kernel(shape: tuple[int, int], *dims: str) -> nnx.Param:
            return nnx.Param(axes(jax.nn.initializers.normal(0.02))(*dims)(rngs.params(), shape, config.param_dtype))

        self.config = config
        self.embedding = kernel((config.vocab, config.embed), "vocab", "embed")
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config)
        self.head = kernel((config.embed, config.vocab), "embed", "vocab")

    def hidden(self, tokens: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.config.dtype)
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        tokens_info = TokenInfo(rope_table(positions, self.config))
        x = jp.hint(jnp.take(self.embedding[...].astype(dtype), tokens, axis=0), "batch", "seq", "embed")
        for block in self.blocks:
            x = (nnx.remat(Block.__call__) if self.config.remat == "full" else Block.__call__)(block, x, tokens_info)
        return jp.hint(self.norm(x), "batch", "seq", "embed")

    def unembedding(self) -> jax.Array:
        return self.head[...].astype(jnp.dtype(self.config.dtype))


def layout_on(name: str, devices: Any, **mesh: int) -> jp.Layout:
    """The rules of ``configs/layouts/NAME.yaml`` on a mesh of these sizes."""
    return jp.Layout(
        jp.MeshSpec(**mesh).build(devices), jp.Layout.from_yaml(LAYOUTS / f"{name}.yaml", devices=64).rules
    )


def llama_step(
    layout: jp.Layout, config: LlamaConfig, batch: int, seq: int, model: type[nnx.Module] = Llama
) -> jax.stages.Lowered:
    """A train step with plain gradient descent."""
    state = jp.abstract_state(layout, lambda key: model(config, rngs=nnx.Rngs(key)), optax.sgd(1e-3))
    placed = layout.sharding(("batch", "seq"), (batch, seq))
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=placed)
    # In 16 bits all collectives then have the same element size.
    precision = {"reduce": "bf16"} if config.dtype == "bfloat16" else None
    return jp.train_step(layout, next_token_loss, precision=precision).lower(
        state, {"tokens": tokens, "targets": tokens}
    )


def training_flops(config: LlamaConfig, batch: int, seq: int) -> int:
    """Matmul FLOPs of one train step over all devices, by hand; scores count all pairs of positions.

    The forward pass counts once, the backward pass twice (for the input and for the weight). Recomputing a full
    block omits its last matmul, because the backward pass does not need the block's output. Keeping the outputs of
    dots without batch dims leaves the two matmuls of attention to recompute.
    """
    c, tokens = config, batch * seq
    attention = 2 * tokens * c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    scores = 2 * 2 * tokens * seq * c.heads * c.head_dim
    matrix = 2 * tokens * c.embed * c.mlp
    block = attention + scores + 3 * matrix
    again = {"none": 0, "full": block - matrix, "dots": scores}[c.remat]
    return 3 * (c.layers * block + 2 * tokens * c.embed * c.vocab) + c.layers * again


def _mapped(mesh: Mesh, body: Any, *shapes: tuple[int, ...]) -> jax.stages.Lowered:
    """``body`` in a ``shard_map`` over all axes of ``mesh``, on fp32 arrays whose first dim is sharded over
    ``data``."""
    spec = P("data")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape in shapes]
    return jax.jit(mapped).lower(*arrays)


def every_collective(mesh: Mesh) -> jax.stages.Lowered:
    """One collective of each kind over ``data``, on local arrays [n, 256] of fp32."""
    n = mesh.shape["data"]

    def body(x: jax.Array) -> jax.Array:
        x = jax.lax.psum_scatter(jnp.sin(x), "data", scatter_dimension=0, tiled=True)
        x = jax.lax.all_gather(jnp.sin(x), "data", axis=0, tiled=True)
        x = jax.lax.all_to_all(jnp.sin(x), "data", split_axis=0, concat_axis=0, tiled=True)
        x = jax.lax.ppermute(jnp.sin(x), "data", [(i, (i + 1) % n) for i in range(n)])
        return jax.lax.psum(jnp.sin(x), "data") + x

    return _mapped(mesh, body, (n * n, 256))


def permute_beside_a_matmul(mesh: Mesh) -> jax.stages.Lowered:
    """A user's custom ring: it passes on the shard that a matmul uses, but is no windowed einsum."""
    n = mesh.shape["data"]

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        total = jnp.zeros((x.shape[0], w.shape[1]))
        for _ in range(2):
            w_next = jax.lax.ppermute(w, "data", [(i, (i + 1) % n) for i in range(n)])
            total, w = total + x @ w, w_next
        return total @ w.T

    return _mapped(mesh, body, (n * 32, 64), (n * 64, 128))


def nested_loops(mesh: Mesh, outer: int, inner: int) -> jax.stages.Lowered:
    """``outer`` × ``inner`` all-reduces of [4, 32] fp32 and as many matmuls of [4, 32] × [32, 32]."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(x @ w, "data")), None

        def outside(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(step, jnp.cos(x), None, length=inner)[0], None

        return jax.lax.scan(outside, x, None, length=outer)[0]

    return _mapped(mesh, body, (mesh.shape["data"] * 4, 32), (mesh.shape["data"] * 32, 32))


def unrolled_by_two(mesh: Mesh, length: int) -> jax.stages.Lowered:
    """``length`` all-reduces of [4, 32] fp32 in a loop that does two per iteration."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(x @ w, "data")), None

        return jax.lax.scan(step, x, None, length=length, unroll=2)[0]

    return _mapped(mesh, body, (mesh.shape["data"] * 4, 32), (mesh.shape["data"] * 32, 32))


def sliced_after(mesh: Mesh, *, own: bool) -> jax.stages.Lowered:
    """A doubled all-reduce of [64, 32] fp32 of which each device keeps 64 / n rows: those of its rank, or rows that
    the data select."""
    n = mesh.shape["data"]

    def body(x: jax.Array) -> jax.Array:
        whole = jax.lax.psum(x, "data") * 2
        row = jax.lax.axis_index("data") * (64 // n) if own else x[0, 0].astype(int)
        return jax.lax.dynamic_slice_in_dim(whole, row, 64 // n)

    return _mapped(mesh, body, (n * 64, 32))


def sliced_over_another_axis(mesh: Mesh) -> jax.stages.Lowered:
    """A sum over ``data`` (4) of [64, 32] fp32 of which each device keeps the slice of its index on ``model`` (2)."""

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, "data"), jax.lax.axis_index("model") * 32, 32)

    return _mapped(mesh, body, (4 * 64, 32))


def rolled(mesh: Mesh) -> jax.stages.Lowered:
    """Rows shifted by one device, which the partitioner compiles to a ring of permutes that belongs to no matmul."""
    place = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=place)
    return jax.jit(lambda x: jnp.roll(x, 64 // mesh.shape["data"], 0), out_shardings=place).lower(x)


def counted_loop(mesh: Mesh, start: int, bound: int, holds: Any, step: Any) -> jax.stages.Lowered:
    """An all-reduce of [4, 32] fp32 while ``holds(counter, bound)``; the loop carries both numbers."""

    def body(x: jax.Array) -> jax.Array:
        def run(carry: Any) -> Any:
            counter, end, x = carry
            return step(counter), end, jnp.tanh(jax.lax.psum(x, "data"))

        return jax.lax.while_loop(lambda carry: holds(carry[0], carry[1]), run, (start, bound, x))[2]

    return _mapped(mesh, body, (mesh.shape["data"] * 4, 32))


def alone_on_an_axis(mesh: Mesh) -> jax.stages.Lowered:
    """An all-reduce and an all-gather over ``model``, an axis of one device."""

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sin(x), "model") + jax.lax.all_gather(x, "model")[0]

    return _mapped(mesh, body, (mesh.shape["data"] * 4, 32))


def part_of_an_axis(mesh: Mesh) -> jax.stages.Lowered:
    """A sum over the inner 2 of 8 devices on ``data``, then a gather over the outer 4, of one row of 32 fp32 each."""

    def pairs(x: jax.Array) -> jax.Array:
        return jnp.sin(x).reshape(4, 2, 32).sum(1)

    return jax.jit(pairs).lower(jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=NamedSharding(mesh, P("data"))))


def until_it_converges(mesh: Mesh) -> jax.stages.Lowered:
    """A loop of unknown length around an all-reduce of [4, 32] fp32."""

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda x: jnp.abs(x).max() > 1e-3, lambda x: jax.lax.psum(jnp.tanh(x), "data") / 100, x
        )

    return _mapped(mesh, body, (mesh.shape["data"] * 4, 32))


def branches(mesh: Mesh) -> jax.stages.Lowered:
    """A conditional: one arm has an all-reduce of [64, 32] fp32 and a matmul, the other a permute of [64, 32] and half
    of the matmul."""
    n = mesh.shape["data"]

    def reduce(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x @ jnp.ones((32, 32)), "data")

    def shift(x: jax.Array) -> jax.Array:
        half = jnp.sin(x)[:, :16] @ jnp.ones((16, 32))
        return jax.lax.ppermute(half, "data", [(i, (i + 1) % n) for i in range(n)])

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.cond(jax.lax.axis_index("data") < n // 2, reduce, shift, x)

    return _mapped(mesh, body, (n * 64, 32))


def kernel_in_a_loop(mesh: Mesh, length: int, flops: int | None) -> jax.stages.Lowered:
    """``length`` runs of a Pallas kernel that states ``flops``, or none."""
    from jax.experimental import pallas as pl

    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    cost = None if flops is None else pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
    kernel = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), cost_estimate=cost)

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(kernel(x)), None), x, None, length=length)[0]

    return _mapped(mesh, body, (mesh.shape["data"] * 8, 128))


def two_matmuls(mesh: Mesh, size: int, layers: int) -> jax.stages.Lowered:
    """Gradients of ``layers`` scanned pairs of matmuls in bf16, with weights sharded over ``data`` and ``model``."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w[0]), NamedSharding(mesh, P("data", "model")))
            return jax.lax.with_sharding_constraint(x @ w[1], NamedSharding(mesh, P("data"))), None

        return (jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32) ** 2).mean()

    place = partial(NamedSharding, mesh)
    specs = P("data"), P(None, "data", "model"), P(None, "model", "data")
    shapes = (size, size), (layers, size, 2 * size), (layers, 2 * size, size)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place(spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    grads = jax.jit(jax.grad(loss, argnums=(1, 2)), out_shardings=(place(specs[1]), place(specs[2])))
    return grads.lower(*arrays)


def gathered_by_hand(mesh: Mesh, tokens: int, embed: int, mlp: int, layers: int) -> jax.stages.Lowered:
    """Gradients of scanned layers in bf16, with weights sharded over ``data`` that a ``shard_map`` gathers."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            whole = [jax.lax.all_gather(shard, "data", axis=0, tiled=True) for shard in w]
            return jnp.tanh(x @ whole[0]) @ whole[1], None

        x = jax.lax.scan(jax.checkpoint(layer), x, (up, down))[0]
        return jax.lax.psum((x.astype(jnp.float32) ** 2).sum(), "data")

    def grads(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P(None, "data"), P(None, "data")), out_specs=P())
        return jax.grad(mapped, argnums=(1, 2))(x, up, down)

    specs = P("data"), P(None, "data"), P(None, "data")
    shapes = (tokens, embed), (layers, embed, mlp), (layers, mlp, embed)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(grads).lower(*arrays)


def expert_layers(
    mesh: Mesh, tokens: int, buffer: int, stated: int, embed: int, mlp: int, experts: int, layers: int
) -> jax.stages.Lowered:
    """Gradients of recomputed layers of experts sharded over ``data``: a ragged exchange of ``tokens`` rows into a
    buffer, two grouped matmuls, and the exchange back; each operation states ``stated`` rows."""
    n = mesh.shape["data"]

    def exchange(x: jax.Array, rows: int, *routing: jax.Array) -> jax.Array:
        received = jnp.zeros((rows, embed), x.dtype)
        with expected_rows(stated):
            return jax.lax.ragged_all_to_all(x, received, *routing, axis_name="data")

    def matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        with expected_rows(stated):
            return jax.lax.ragged_dot(x, w, sizes)

    def body(x: jax.Array, up: jax.Array, down: jax.Array, *routing: jax.Array) -> jax.Array:
        begin, send, place, received = routing

        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            sizes = received.reshape(n, experts // n).sum(0)
            h = jax.nn.silu(matmul(exchange(x, buffer, *routing), w[0], sizes))
            back = exchange(matmul(h, w[1], sizes), tokens, place, received, begin, send)
            return jnp.tanh(back), None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (up, down))[0]

    weights = P(None, "data")
    in_specs = (P("data"), weights, weights, *(P("data"),) * 4)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P("data"), check_vma=False)

    def loss(*arrays: jax.Array) -> jax.Array:
        return (mapped(*arrays).astype(jnp.float32) ** 2).sum()

    shapes = (n * tokens, embed), (layers, experts, embed, mlp), (layers, experts, mlp, embed), *((n * experts,),) * 4
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 1 else jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays)
