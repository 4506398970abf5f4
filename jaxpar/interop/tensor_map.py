"""Which Hugging Face tensors make up each parameter, and how their dims are arranged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.moe.config import MoEConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class TensorRule:
    """How a parameter follows from tensors of a Hugging Face checkpoint.

    Attributes:
      path: the parameter's path, such as ``blocks/attention/q``.
      name: the name of the tensors. ``{layer}`` and ``{expert}`` are indices along the parameter's first dims.
      pattern: the dims of a tensor and of the parameter, such as ``(h d) e -> e h d``; dims in brackets are joined.
      first_layer: the ``{layer}`` of the parameter's first row.
      interleaved: how many of the last numbers of the dim ``d`` are rotary pairs (0, 1), (2, 3), ... in the tensor, but
        pairs (0, n / 2), (1, n / 2 + 1), ... in the parameter.
    """

    path: str
    name: str
    pattern: str
    first_layer: int = 0
    interleaved: int = 0

    @property
    def stacked(self) -> int:
        """The number of the parameter's first dims that are indices in the name."""
        return self.name.count("{")

    def names(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields the index along the stacked dims, and the name, of each tensor of a parameter of this shape."""
        indices = re.findall(r"\{(\w+)\}", self.name)
        for index in np.ndindex(*shape[: self.stacked]):
            numbers = dict(zip(indices, index, strict=True))
            if "layer" in numbers:
                numbers["layer"] += self.first_layer
            yield index, self.name.format(**numbers)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The dims that each dim of the tensor joins."""
        theirs = self.pattern.split(" -> ")[0]
        return tuple(tuple((many or one).split()) for many, one in re.findall(r"\(([^)]*)\)|(\w+)", theirs))

    @property
    def order(self) -> tuple[int, ...]:
        """For each dim of the tensor, with joined dims apart, the dim of the parameter's rows."""
        ours = self.pattern.split(" -> ")[1].split()
        return tuple(ours.index(dim) for group in self.groups for dim in group)

    @property
    def reordered(self) -> int | None:
        """The dim of the tensor, with joined dims apart, whose numbers are in another order in the parameter."""
        return [dim for group in self.groups for dim in group].index("d") if self.interleaved else None

    def apart(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor, with joined dims apart, of a parameter of this shape."""
        rows = shape[self.stacked :]
        return tuple(rows[dim] for dim in self.order)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor of a parameter of this shape.

        >>> TensorRule("q", "layers.{layer}.q", "(h d) e -> e h d").shape((2, 64, 4, 16))
        (64, 64)
        """
        sizes = iter(self.apart(shape))
        return tuple(math.prod(next(sizes) for _ in group) for group in self.groups)

    def their_order(self, size: int) -> np.ndarray:
        """Returns, for each number of the parameter's dim ``d``, its position in the tensor.

        >>> TensorRule("q", "q", "d -> d", interleaved=4).their_order(6).tolist()
        [0, 1, 2, 4, 3, 5]
        """
        rotated = np.arange(self.interleaved).reshape(-1, 2).T.reshape(-1)
        plain = size - self.interleaved
        return np.concatenate([np.arange(plain), plain + rotated])


_NORMS = (("attention_norm/scale", "input_layernorm.weight"), ("mlp_norm/scale", "post_attention_layernorm.weight"))
_GEMMA_NORMS = (
    ("attention_norm/scale", "input_layernorm.weight"),
    ("post_attention_norm/scale", "post_attention_layernorm.weight"),
    ("mlp_norm/scale", "pre_feedforward_layernorm.weight"),
    ("post_mlp_norm/scale", "post_feedforward_layernorm.weight"),
)
_ATTENTION = (
    *((name, f"{name}_proj.weight", "(h d) e -> e h d") for name in "qkv"),
    ("o", "o_proj.weight", "e (h d) -> h d e"),
)
_BIASES = tuple((f"{name}_bias", f"{name}_proj.bias", "(h d) -> h d") for name in "qkv")
_MLP = (("gate", "gate_proj", "f e -> e f"), ("up", "up_proj", "f e -> e f"), ("down", "down_proj", "e f -> f e"))
_MIXTRAL = (("gate", "w1", "f e -> e f"), ("up", "w3", "f e -> e f"), ("down", "w2", "e f -> f e"))


def tensor_rules(config: LlamaConfig) -> list[TensorRule]:
    """Returns the rules of a model, one for each parameter, in the order of the checkpoint's layers."""
    rules = [TensorRule("embedding", EMBEDDING, "v e -> v e")]
    if isinstance(config, MoEConfig):
        if config.dense_layers:
            rules += [*_attention(config, "dense_blocks", 0), *_mlp("dense_blocks/mlp", "mlp.")]
        rules += [*_attention(config, "blocks", config.dense_layers), *_mixture(config)]
        rules += _further_tokens(config)
    else:
        rules += [*_attention(config, "blocks", 0), *_mlp("blocks/mlp", "mlp.")]
    rules.append(TensorRule("norm/scale", "model.norm.weight", "e -> e"))
    if not config.tie_embeddings:
        rules.append(TensorRule("head", HEAD, "v e -> e v"))
    return rules


_FURTHER = (
    ("token_norm/scale", "enorm.weight", "e -> e"),
    ("hidden_norm/scale", "hnorm.weight", "e -> e"),
    ("projection", "eh_proj.weight", "e f -> f e"),
    ("norm/scale", "shared_head.norm.weight", "e -> e"),
)


def _further_tokens(config: MoEConfig) -> list[TensorRule]:
    """Returns the rules of the layers that predict further tokens, which follow the model's own."""
    rules: list[TensorRule] = []
    for depth in range(config.mtp_depth):
        path, layer = f"mtp/{depth}", LAYER.format(layer=config.layers + depth)
        rules += [TensorRule(f"{path}/{ours}", layer + theirs, pattern) for ours, theirs, pattern in _FURTHER]
        for rule in (*_attention(config, "blocks", 0), *_mixture(config)):
            own = f"{path}/block/{rule.path.removeprefix('blocks/')}"
            rules.append(replace(rule, path=own, name=rule.name.replace(LAYER, layer), first_layer=0))
    return rules


def shared_copies(config: LlamaConfig) -> list[TensorRule]:
    """Returns the copies of the embedding and the output head in the layers that predict further tokens.

    Published checkpoints have them, and engines for speculative decoding read them.
    """
    depth = config.mtp_depth if isinstance(config, MoEConfig) else 0
    head = TensorRule("embedding", "", "v e -> v e") if config.tie_embeddings else TensorRule("head", "", "v e -> e v")
    found: list[TensorRule] = []
    for layer in (LAYER.format(layer=config.layers + k) for k in range(depth)):
        found.append(TensorRule("embedding", f"{layer}embed_tokens.weight", "v e -> v e"))
        found.append(replace(head, name=f"{layer}shared_head.head.weight"))
    return found


def _mlp(path: str, name: str, first_layer: int = 0) -> list[TensorRule]:
    return [TensorRule(f"{path}/{ours}", f"{LAYER}{name}{theirs}.weight", p, first_layer) for ours, theirs, p in _MLP]


def _attention(config: LlamaConfig, blocks: str, first: int) -> list[TensorRule]:
    norms = _NORMS if config.gemma is None else _GEMMA_NORMS
    rules = [TensorRule(f"{blocks}/{ours}", f"{LAYER}{theirs}", "e -> e", first) for ours, theirs in norms]
    own = lambda ours, theirs, pattern, interleaved=0: rules.append(
        TensorRule(f"{blocks}/attention/{ours}", f"{LAYER}self_attn.{theirs}", pattern, first, interleaved)
    )
    latent = config.latent_attention if isinstance(config, MoEConfig) else None
    if latent is None:
        for parts in (*_ATTENTION, *(_BIASES if config.qkv_bias else ())):
            own(*parts)
        if config.qk_norm:
            own("q_norm/scale", "q_norm.weight", "d -> d")
            own("k_norm/scale", "k_norm.weight", "d -> d")
        return rules
    interleaved = latent.rope_dim
    if latent.q_latent is None:
        own("q", "q_proj.weight", "(h d) e -> e h d", interleaved)
    else:
        own("q_down", "q_a_proj.weight", "l e -> e l")
        own("q_norm/scale", "q_a_layernorm.weight", "l -> l")
        own("q_up", "q_b_proj.weight", "(h d) l -> l h d", interleaved)
    own("kv_down", "kv_a_proj_with_mqa.weight", "d e -> e d", interleaved)
    own("kv_norm/scale", "kv_a_layernorm.weight", "l -> l")
    own("kv_up", "kv_b_proj.weight", "(h d) l -> l h d")
    own("o", "o_proj.weight", "e (h d) -> h d e")
    return rules


def _mixture(config: MoEConfig) -> list[TensorRule]:
    mixtral = not config.qk_norm and config.latent_attention is None
    folder, experts = ("block_sparse_moe.", _MIXTRAL) if mixtral else ("mlp.", _MLP)
    first, path = config.dense_layers, "blocks/mixture"
    rules = [TensorRule(f"{path}/router", f"{LAYER}{folder}gate.weight", "x e -> e x", first)]
    for ours, theirs, pattern in experts:
        name = f"{LAYER}{folder}experts.{{expert}}.{theirs}.weight"
        rules.append(TensorRule(f"{path}/{ours}", name, pattern, first))
    if config.shared_experts:
        rules += _mlp(f"{path}/shared", f"{folder}shared_experts.", first)
    if config.bias_rate is not None:
        name = f"{LAYER}{folder}gate.e_score_correction_bias"
        rules.append(TensorRule(f"{path}/router_bias", name, "x -> x", first))
    return rules
