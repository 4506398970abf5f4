"""The models of the family in Flax NNX."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxpar.nnx import axes, stacked

from .model_parts import Tools, named_init, squares

ZEROS, ONES = nnx.initializers.zeros, nnx.initializers.ones
LAYERS = 2


def dense(case: Any, sizes: tuple[int, int], dims: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    bias = axes(ZEROS)(dims[1])
    return nnx.Linear(*sizes, kernel_init=axes(named_init(case))(*dims), bias_init=bias, rngs=rngs)


class Dense(nnx.Module):
    """An MLP of twice the width. In fp32 the gradient of jax.nn.gelu is right only to 5e-6, that of silu to 1e-7."""

    def __init__(self, case: Any, rngs: nnx.Rngs):
        self.up = dense(case, (case.embed, 2 * case.embed), ("embed", "mlp"), rngs)
        self.down = dense(case, (2 * case.embed, case.embed), ("mlp", "embed"), rngs)

    def __call__(self, x: Any, tools: Tools) -> Any:
        return x + self.down(tools.hint(jax.nn.silu(self.up(x)), "batch", "seq", "mlp"))


class Attention(nnx.Module):
    def __init__(self, case: Any, rngs: nnx.Rngs):
        make = lambda heads, name: nnx.LinearGeneral(
            case.embed, (heads, 2), kernel_init=axes(ONES)("embed", name, None), use_bias=False, rngs=rngs
        )
        self.q, self.k, self.v = (
            make(case.heads, "heads"),
            make(case.kv_heads, "kv_heads"),
            make(case.kv_heads, "kv_heads"),
        )
        out = axes(ONES)("heads", None, "embed")
        self.o = nnx.LinearGeneral(
            (case.heads, 2), case.embed, axis=(-2, -1), kernel_init=out, use_bias=False, rngs=rngs
        )

    def __call__(self, x: Any, tools: Tools) -> Any:
        return x + self.o(tools.attend(self.q(x), self.k(x), self.v(x)))


class Own(nnx.Module):
    """The attention module of Flax, without the library's attention."""

    def __init__(self, case: Any, rngs: nnx.Rngs):
        self.inner = nnx.MultiHeadAttention(
            num_heads=case.heads,
            in_features=case.embed,
            qkv_features=2 * case.heads,
            decode=False,
            kernel_init=axes(ONES)("embed", "heads", None),
            bias_init=axes(ZEROS)("heads", None),
            out_kernel_init=axes(ONES)("heads", None, "embed"),
            out_bias_init=axes(ZEROS)("embed"),
            rngs=rngs,
        )

    def __call__(self, x: Any, tools: Tools) -> Any:
        return x + self.inner(x)


class Simple(nnx.Module):
    """A norm or a convolution."""

    def __init__(self, case: Any, kind: str, rngs: nnx.Rngs):
        names = {"scale_init": axes(ONES)("embed"), "bias_init": axes(ZEROS)("embed")}
        if kind == "norm":
            self.inner: Any = nnx.LayerNorm(case.embed, **names, rngs=rngs)
        elif kind == "batch norm":
            self.inner = nnx.BatchNorm(
                case.embed, momentum=0.5, use_fast_variance=False, use_running_average=False, **names, rngs=rngs
            )
        else:
            kernel, bias = axes(ONES)(None, "embed", None), axes(ZEROS)(None)
            self.inner = nnx.Conv(case.embed, case.embed, (3,), kernel_init=kernel, bias_init=bias, rngs=rngs)

    def __call__(self, x: Any, tools: Tools) -> Any:
        return self.inner(x)


class Stack(nnx.Module):
    """Blocks with stacked parameters, run by a scan."""

    def __init__(self, case: Any, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: Dense(case, rngs), transform_metadata=stacked("layers"))
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x: Any, tools: Tools) -> Any:
        one = lambda block, x: block(x, tools)
        metadata = stacked("layers")
        scan = nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=metadata)
        return scan(self.blocks, x)


class Model(nnx.Module):
    def __init__(self, case: Any, rngs: nnx.Rngs):
        self.case = nnx.static(case) if hasattr(nnx, "static") else case
        if case.tokens:
            self.table = nnx.Embed(
                case.vocab, case.embed, embedding_init=axes(named_init(case))("vocab", "embed"), rngs=rngs
            )
            if not case.tied:
                self.head = nnx.Param(
                    named_init(case)(rngs.params(), (case.embed, case.vocab)), logical_dims=("embed", "vocab")
                )
        kinds = {"dense": Dense, "attention": Attention, "flax attention": Own, "stack": Stack}
        made = [kinds[n](case, rngs) if n in kinds else Simple(case, n, rngs) for n in case.body]
        self.body = nnx.List(made)

    def __call__(self, batch: Any, tools: Tools) -> Any:
        """The loss, and the weight of its mean."""
        x = tools.look_up(self.table, batch["x"]) if hasattr(self, "table") else batch["x"]
        x = tools.hint(tools.narrow(x), "batch", "seq", "embed")
        for i, layer in enumerate(self.body):
            x = tools.hint(tools.drop(layer(x, tools), i), "batch", "seq", "embed")
        if not hasattr(self, "table"):
            return squares(self.case, x, batch)
        head = self.head[...] if hasattr(self, "head") else self.table.embedding[...].T
        return tools.loss(x, head, batch["targets"], batch["counted"])
