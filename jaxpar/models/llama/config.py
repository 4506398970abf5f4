"""``LlamaConfig``, the sizes and numerics of a Llama, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.models.llama.rope import Divisor, RopeScaling
from jaxpar.parallel.attention.context import AUTO, Context
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED
from jaxpar.parallel.overlap.interleave import Cut, check_count
from jaxpar.training.remat import OUTPUT, RematPolicy
from jaxpar.utils.checks import INT32, Range

_Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_Size = Annotated[int, Range(1, 2**24)]
_Layers = Annotated[int, Range(1, 2**14)]
_Positive = Annotated[float, Range(0, 1e12, above=True)]

NAMES = (SAVED, KEPT, OUTPUT, "qkv", "mlp_hidden")
"""Checkpoint names of a layer's tensors that :class:`jaxpar.RematPolicy` may save or offload."""


def halved(config: LlamaConfig) -> bool:
    """Whether the layers run on two halves of each sequence (``copies_dim="seq"``)."""
    return config.copies > 1 and config.copies_dim == "seq"


@dataclass(frozen=True)
class GemmaConfig:
    """What Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786) change in a Llama.

    Embeddings are multiplied by sqrt(``embed``). Norms multiply by 1 + their parameter. Two more norms follow attention
    and MLP. The gate of the MLP is a GELU in its tanh form.

    Attributes:
      query_scalar: scores are divided by its square root, instead of that of ``head_dim``.
      attention_softcap: c: a score s becomes c tanh(s / c); ``None`` for no cap.
      logit_softcap: the same for logits.
      local_rope_theta: base of the rotary frequencies, without scaling, in layers with a sliding window; ``None`` for
        the same frequencies as in other layers.
    """

    query_scalar: _Size = 256
    attention_softcap: _Positive | None = None
    logit_softcap: _Positive | None = None
    local_rope_theta: Divisor | None = None


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and numerics of a Llama.

    Attributes:
      vocab: vocabulary size.
      embed: width of the residual stream.
      layers: number of blocks.
      heads: query heads.
      kv_heads: key/value heads; must divide ``heads``.
      head_dim: size of one head; must be even.
      mlp: hidden width of the gated MLP.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the rotary frequencies are stretched beyond the context length of the pretraining.
      norm_eps: epsilon of the RMS norms.
      qk_norm: normalize the queries and keys of each head, as Qwen3 does.
      qkv_bias: add biases to queries, keys and values, as Qwen2 does.
      sliding_window: a token attends to this many tokens, itself and those before it, as in Mistral; ``None`` for all.
      window_pattern: which layers have the sliding window; the others attend to all tokens. It repeats: [true, false]
        alternates, as Gemma 2 does.
      tie_embeddings: use the embedding table, transposed, as the output head.
      gemma: the further differences of Gemma 2 and 3; ``None`` for a Llama.
      dtype: the compute dtype.
      param_dtype: the dtype in which parameters are stored.
      remat: what the backward pass recomputes: the name of a policy, or a :class:`jaxpar.RematPolicy`.
      reshard_after_forward: gather sharded weights again for the backward pass. A number gathers them again within
        groups of that many devices. False keeps the gathered weights.
      context: how attention splits the sequence over devices.
      copies: run the layers on this many parts of each device's batch (:func:`jaxpar.overlap.interleave_batches`).
      copies_dim: ``batch`` splits each device's rows into these parts, ``seq`` its tokens.
      overlap_matmuls: the matmuls overlap with the gathers and scatters of sequences beside them, on TPUs and where
        rules shard ``residual_seq``; see :func:`jaxpar.overlap.gather_dot`. In layers with experts, the gathers of
        their weights and the scatters of the gradients overlap instead; see :func:`jaxpar.experts`.

    Raises:
      ConfigError: ``heads`` is not a multiple of ``kv_heads``, ``head_dim`` is odd, ``window_pattern`` has no true,
        ``remat`` does not fit the layers, ``copies`` is not 1 or 2, ``copies`` does not fit ``gemma``, ``context`` or
        ``reshard_after_forward``, or ``overlap_matmuls`` does not fit ``gemma`` or ``copies``.

    After Touvron et al. 2023 (arXiv:2307.09288) and Llama 3.1 (arXiv:2407.21783).

    >>> config = LlamaConfig(layers=2, embed=64, heads=2, kv_heads=1, mlp=192)
    >>> config.params, f"{config.flops_per_token(seq=128):.3g}"
    (131392, '7.86e+05')
    """

    vocab: _Size = 256
    embed: _Size = 128
    layers: _Layers = 4
    heads: _Layers = 4
    kv_heads: _Layers = 2
    head_dim: _Layers = 32
    mlp: _Size = 384
    rope_theta: Divisor = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Range(0, 1.0)] = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    sliding_window: Annotated[int, Range(1, INT32)] | None = None
    window_pattern: tuple[bool, ...] = (True,)
    tie_embeddings: bool = False
    gemma: GemmaConfig | None = None
    dtype: _Dtype = "float32"
    param_dtype: _Dtype = "float32"
    remat: str | RematPolicy = "none"
    reshard_after_forward: bool | Annotated[int, Range(1, INT32)] = True
    context: Context = AUTO
    copies: int = 1
    copies_dim: Cut = "batch"
    overlap_matmuls: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"llama: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}, so query heads cannot share "
                f"key/value heads evenly. Remedy: a kv_heads that divides {self.heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                "llama: head_dim must be even, because rotary embeddings rotate pairs of numbers, got "
                f"{self.head_dim}. Remedy: an even head_dim."
            )
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta == 1:
            raise ConfigError(
                "llama: rope_theta is 1, so all rotary pairs have one frequency, and yarn cannot tell which of them to "
                "stretch. Remedy: the rope_theta of the pretraining, such as 10000; or rope_scaling: {kind: linear} "
                "(config.json: rope_type)."
            )
        if not any(self.window_pattern):
            raise ConfigError(
                f"llama: window_pattern must have a true, got {list(self.window_pattern)}. Remedy: leave it out, or "
                "sliding_window: null for layers that all attend to all tokens."
            )
        if self.gemma is not None and self.copies > 1:
            raise ConfigError(
                f"overlap.ways is {self.copies}, but the norms after attention and MLP of a Gemma need sums over "
                "devices before the next part's turn. Remedy: overlap: {ways: 1}."
            )
        if self.overlap_matmuls and (self.gemma is not None or self.copies > 1):
            why = (
                f"overlap.ways is {self.copies}, which overlaps the same communication with the other half"
                if self.gemma is None
                else "the layers of a Gemma gather whole sequences for their norms"
            )
            raise ConfigError(f"overlap.matmuls is true, but {why}. Remedy: leave overlap.matmuls out.")
        RematPolicy.of(self.remat).segments(self.layers)
        check_count(self.copies, self.copies_dim)
        if halved(self) and self.context.load_balance is not None:
            raise ConfigError(
                "overlap.dim is 'seq', which uses its own token order, but parallel.context.load_balance is "
                f"{self.context.load_balance!r}. Remedy: leave load_balance out, or overlap.dim: batch."
            )
        if self.copies > 1 and not isinstance(self.reshard_after_forward, bool):
            raise ConfigError(
                f"overlap.ways is {self.copies}, but reshard_after_forward is {self.reshard_after_forward}: both parts "
                "share one gather of a layer's weights, over all devices. Remedy: reshard_after_forward: true or "
                "false, or overlap: {ways: 1}."
            )

    @property
    def supports_chunks(self) -> bool:
        """Whether a pipeline may process sequences in chunks: only if all layers have the same window."""
        return len(set(self.local_layers)) == 1

    @property
    def block_layers(self) -> int:
        """The number of layers in the last stack, ``blocks``."""
        return self.layers

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has the sliding window."""
        pattern = self.window_pattern
        return tuple(self.sliding_window is not None and pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def score_scale(self) -> float | None:
        """The factor of the attention scores; ``None`` for 1 / sqrt(head_dim)."""
        return None if self.gemma is None else self.gemma.query_scalar**-0.5

    @property
    def logit_softcap(self) -> float | None:
        """The soft cap of the logits, if there is one."""
        return None if self.gemma is None else self.gemma.logit_softcap

    @property
    def qk_dim(self) -> int:
        """The size of a head's query and key."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """The size of a head's value."""
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """The numbers of a head's query and key that are rotated."""
        return self.head_dim

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the model's stacks of layers, in the order in which they run."""
        return ("blocks",)

    @property
    def matmul_params(self) -> int:
        """The number of parameters used in a matmul for every token: all but the norms and the embedding lookup."""
        attention = self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.embed * self.mlp) + self.embed * self.vocab

    @property
    def params(self) -> int:
        """The total number of parameters."""
        lookup = 0 if self.tie_embeddings else self.embed * self.vocab
        norms = ((2 if self.gemma is None else 4) * self.layers + 1) * self.embed
        norms += 2 * self.layers * self.head_dim if self.qk_norm else 0
        biases = self.layers * self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return self.matmul_params + lookup + norms + biases

    def flops_per_token(self, seq: int) -> float:
        """Returns the training FLOPs per token, without recomputation; causal attention counts half of its matrix."""
        return 6.0 * self.matmul_params + 12.0 * self.layers * self.heads * self.head_dim * self.mean_keys(seq)

    def mean_keys(self, seq: int) -> float:
        """Returns how many keys a query sees on average over layers: ``seq`` / 2, or less with a sliding window."""
        window, local = min(self.sliding_window or seq, seq), sum(self.local_layers) / self.layers
        return local * (window - window * window / (2 * seq)) + (1 - local) * seq / 2


_BF16 = LlamaConfig(dtype="bfloat16", remat="full")
_8B = replace(_BF16, vocab=128_256, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336)
_8B = replace(_8B, rope_theta=500_000.0, rope_scaling=RopeScaling())
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(),
    "1b": replace(_BF16, vocab=32_000, embed=2048, layers=16, heads=16, kv_heads=16, head_dim=128, mlp=7168),
    "llama3_1_8b": _8B,
    "llama3_1_70b": replace(_8B, embed=8192, layers=80, heads=64, mlp=28_672),
}


def preset(name: str, **changes: Any) -> LlamaConfig:
    """Returns the preset called ``name`` with ``changes`` applied to its fields.

    Args:
      name: ``tiny``, ``1b``, ``llama3_1_8b`` or ``llama3_1_70b``.
      **changes: values of :class:`LlamaConfig` that replace those of the preset.

    Raises:
      ConfigError: no preset has this name, or the changed fields do not fit each other.

    >>> preset("1b").params
    1104218112
    """
    if name not in [*PRESETS]:  # a mapping, which YAML can give, has no hash
        raise ConfigError(
            f"llama: unknown preset {name!r}.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}."
        )
    return replace(PRESETS[name], **changes)
