"""The models of the family in Flax Linen."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from jaxpar.linen import axes

from .model_parts import named_init, squares

ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones
LAYERS = 2


class Dense(nn.Module):
    """An MLP of twice the width, with a residual connection."""

    case: Any
    tools: Any

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        make = lambda features, a, b, name: nn.Dense(
            features, kernel_init=axes(named_init(self.case))(a, b), bias_init=axes(ZEROS)(b), name=name
        )
        h = jax.nn.silu(make(2 * self.case.embed, "embed", "mlp", "up")(x))
        x = x + make(self.case.embed, "mlp", "embed", "down")(self.tools.hint(h, "batch", "seq", "mlp"))
        return x, None


class Attention(nn.Module):
    case: Any
    tools: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        case = self.case
        make = lambda heads, dim, name: nn.DenseGeneral(
            (heads, 2), kernel_init=axes(ONES)("embed", dim, None), use_bias=False, name=name
        )(x)
        sizes = (("q", case.heads, "heads"), ("k", case.kv_heads, "kv_heads"), ("v", case.kv_heads, "kv_heads"))
        o = self.tools.attend(*(make(heads, dim, name) for name, heads, dim in sizes))
        out = axes(ONES)("heads", None, "embed")
        return x + nn.DenseGeneral(case.embed, axis=(-2, -1), kernel_init=out, use_bias=False, name="o")(o)


class Model(nn.Module):
    case: Any
    tools: Any

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        """The loss, and the weight of its mean."""
        case, tools = self.case, self.tools
        x = batch["x"]
        if case.tokens:
            table = nn.Embed(
                case.vocab, case.embed, embedding_init=axes(named_init(case))("vocab", "embed"), name="table"
            )
            x = table(x)
            head = (
                table.embedding.T
                if case.tied
                else self.param("head", axes(named_init(case))("embed", "vocab"), (case.embed, case.vocab))
            )
        x = tools.hint(tools.narrow(x), "batch", "seq", "embed")
        for i, kind in enumerate(case.body):
            x = tools.hint(tools.drop(self._layer(kind, i, x), i), "batch", "seq", "embed")
        return tools.loss(x, head, batch["targets"], batch["counted"]) if case.tokens else squares(case, x, batch)

    def _layer(self, kind: str, i: int, x: Any) -> Any:
        case, name = self.case, f"{kind.replace(' ', '_')}_{i}"
        names = {"scale_init": axes(ONES)("embed"), "bias_init": axes(ZEROS)("embed"), "name": name}
        if kind == "dense":
            return Dense(case, self.tools, name=name)(x)[0]
        if kind == "attention":
            return Attention(case, self.tools, name=name)(x)
        if kind == "norm":
            return nn.LayerNorm(**names)(x)
        if kind == "batch norm":
            return nn.BatchNorm(momentum=0.5, use_fast_variance=False, use_running_average=False, **names)(x)
        if kind == "conv":
            kernel, bias = axes(ONES)(None, "embed", None), axes(ZEROS)(None)
            return nn.Conv(case.embed, (3,), kernel_init=kernel, bias_init=bias, name=name)(x)
        if kind == "flax attention":
            return x + nn.MultiHeadDotProductAttention(
                num_heads=case.heads,
                qkv_features=2 * case.heads,
                out_features=case.embed,
                kernel_init=axes(ONES)("embed", "heads", None),
                out_kernel_init=axes(ONES)("heads", None, "embed"),
                use_bias=False,
                name=name,
            )(x)
        options: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
        scan = nn.scan(Dense, **options, metadata_params={nn.PARTITION_NAME: "layers"})
        return scan(case, self.tools, name=name)(x, None)[0]
