"""``MoEConfig``, the sizes and numerics of a mixture-of-experts decoder, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.parallel.experts.options import Dispatch, check_options
from jaxpar.parallel.experts.routing import Router, Score
from jaxpar.training.remat import RematPolicy
from jaxpar.utils.checks import Range

_Count = Annotated[int, Range(1, 2**14)]
_Size = Annotated[int, Range(1, 2**24)]
_Natural = Annotated[int, Range(0, 2**14)]
_Weight = Annotated[float, Range(0, 1e6)]

LATENT_EPS = 1e-6
"""Epsilon of the norms of the latent vectors: that of DeepSeek-V3, whose ``rms_norm_eps`` is for its other norms."""


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from one small vector per token.

    Attributes:
      kv_latent: width of the vector that keys and values are computed from.
      q_latent: width of the vector that queries are computed from; ``None`` computes them from the residual stream.
      rope_dim: numbers of each head's query and key that are rotated; the rotated part of the key is shared by all
        heads. Must be even.
      value_dim: size of a head's value.

    The other numbers of a head's query and key are ``MoEConfig.head_dim``. The norms of both vectors have an epsilon of
    1e-6, as in DeepSeek-V3; ``norm_eps`` is for the other norms.
    """

    kv_latent: _Size = 512
    q_latent: _Size | None = None
    rope_dim: _Count = 64
    value_dim: _Count = 128


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes and numerics of a decoder whose MLPs are mixtures of experts.

    Attributes:
      experts: the number of experts of a layer.
      k: the experts that a token chooses.
      expert_mlp: hidden width of one expert. ``mlp`` is the width of dense layers.
      shared_experts: experts that every token takes; together one MLP of the width ``shared_experts * expert_mlp``.
      dense_layers: this many of the first layers have a dense MLP of the width ``mlp``.
      score, normalize, scale, groups, groups_per_token: how tokens choose experts; see :class:`jaxpar.moe.Router`.
      balance_loss: weight of the load-balance loss of each layer.
      balance_per: what the load is counted over: ``batch``, or each ``sequence``.
      z_loss: weight of the router's z-loss of each layer.
      bias_rate: the step of the bias that balances the choices without a loss (DeepSeek-V3); ``None`` for no bias.
      dispatch, capacity_factor, pieces: how rows reach their experts; see :func:`jaxpar.experts`.
      latent_attention: multi-head latent attention instead of grouped-query attention.
      mtp_depth: the number of further tokens that are predicted in training, each by a layer of its own
        (DeepSeek-V3's multi-token prediction); see :mod:`jaxpar.models.moe.multi_token`.
      mtp_weight: the weight of the mean of their losses.

    Raises:
      ConfigError: as :class:`jaxpar.models.LlamaConfig`; or the router's sizes or an option of the dispatch do not fit.

    >>> config = MoEConfig(layers=2, embed=64, heads=2, kv_heads=1, experts=8, k=2, expert_mlp=96)
    >>> config.params, config.matmul_params
    (353600, 115712)
    """

    experts: _Count = 8
    k: _Count = 2
    expert_mlp: _Size = 384
    shared_experts: _Natural = 0
    dense_layers: _Natural = 0
    score: Score = "softmax"
    normalize: bool = True
    scale: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    groups: _Count = 1
    groups_per_token: _Count = 1
    balance_loss: _Weight = 0.01
    balance_per: Literal["batch", "sequence"] = "batch"
    z_loss: _Weight = 0.0
    bias_rate: Annotated[float, Range(0, 1.0, above=True)] | None = None
    dispatch: Dispatch = "auto"
    capacity_factor: float | None = None
    pieces: int | None = None
    latent_attention: LatentAttentionConfig | None = None
    mtp_depth: Annotated[int, Range(0, 64)] = 0
    mtp_weight: _Weight = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.dispatch, self.capacity_factor, self.pieces)
        if self.gemma is not None:
            raise ConfigError("moe: gemma is set, but no Gemma has experts. Remedy: family: llama.")
        self.router  # noqa: B018  its sizes are checked
        if self.dense_layers >= self.layers:
            raise ConfigError(
                f"moe: dense_layers must be less than layers={self.layers}, got {self.dense_layers}. Remedy: family: "
                "llama, which has no experts."
            )
        if self.dense_layers and RematPolicy.of(self.remat).layers:
            raise ConfigError(
                f"moe: remat.layers selects some of {self.layers} layers, but dense_layers={self.dense_layers} of them "
                "are another stack. Remedy: leave remat.layers out."
            )
        if self.copies > 1:
            raise ConfigError(
                f"moe: overlap.ways is {self.copies}, but layers with experts run on whole batches. Remedy: overlap: "
                "{ways: 1}."
            )
        if self.latent_attention is not None and self.kv_heads != self.heads:
            raise ConfigError(
                f"moe: latent attention gives every query head its own key, but heads={self.heads} and kv_heads="
                f"{self.kv_heads}. Remedy: kv_heads: {self.heads}."
            )

    @property
    def supports_chunks(self) -> bool:
        """Whether a pipeline may process sequences in chunks: not yet with losses of the layers' own."""
        return False

    @property
    def qk_dim(self) -> int:
        """The size of a head's query and key."""
        return self.head_dim + (0 if self.latent_attention is None else self.latent_attention.rope_dim)

    @property
    def value_dim(self) -> int:
        """The size of a head's value."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.value_dim

    @property
    def score_scale(self) -> float | None:
        """The factor of the attention scores; ``None`` for 1 / sqrt(qk_dim)."""
        if self.latent_attention is None or self.rope_scaling is None:
            return None
        return float(self.rope_scaling.score_factor * self.qk_dim**-0.5)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the model's stacks of layers, in the order in which they run."""
        return ("dense_blocks", "blocks") if self.dense_layers else ("blocks",)

    @property
    def rope_dim(self) -> int:
        """The numbers of a head's query and key that are rotated."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.rope_dim

    @property
    def router(self) -> Router:
        """How tokens choose experts."""
        return Router(self.experts, self.k, self.score, self.normalize, self.scale, self.groups, self.groups_per_token)

    @property
    def block_layers(self) -> int:
        """The number of layers in the last stack, ``blocks``, which has the experts."""
        return self.expert_layers

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers - self.dense_layers

    @property
    def attention_params(self) -> int:
        """The parameters of one layer's attention that are used in matmuls."""
        latent = self.latent_attention
        if latent is None:
            return self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        query = self.heads * (self.head_dim + latent.rope_dim)
        q = self.embed * query if latent.q_latent is None else latent.q_latent * (self.embed + query)
        kv = self.embed * (latent.kv_latent + latent.rope_dim)
        kv += latent.kv_latent * self.heads * (self.head_dim + latent.value_dim)
        return q + kv + self.heads * latent.value_dim * self.embed

    @property
    def matmul_params(self) -> int:
        """The number of parameters used in a matmul for every token: of the experts, those that a token chooses.

        The output head counts once more for each further token that is predicted.
        """
        return self._matmul_params(self.k) + self.mtp_depth * self.embed * self.vocab

    def _matmul_params(self, experts: int) -> int:
        mixture = self.embed * self.experts + 3 * self.embed * self.expert_mlp * (experts + self.shared_experts)
        dense = 3 * self.embed * self.mlp
        layers = self.layers * self.attention_params + self.expert_layers * mixture + self.dense_layers * dense
        further = self.attention_params + mixture + 2 * self.embed**2
        return layers + self.embed * self.vocab + self.mtp_depth * further

    @property
    def params(self) -> int:
        """The total number of parameters."""
        lookup = 0 if self.tie_embeddings else self.embed * self.vocab
        norms = (2 * self.layers + 1 + 5 * self.mtp_depth) * self.embed
        norms += self._inner_vectors * (self.layers + self.mtp_depth)
        bias = 0 if self.bias_rate is None else self.experts * (self.expert_layers + self.mtp_depth)
        return self._matmul_params(self.experts) + lookup + norms + bias

    @property
    def _inner_vectors(self) -> int:
        """The parameters of the norms and biases inside one layer's attention."""
        latent = self.latent_attention
        if latent is not None:
            return latent.kv_latent + (latent.q_latent or 0)
        norms = 2 * self.head_dim if self.qk_norm else 0
        return norms + (self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0)

    def flops_per_token(self, seq: int) -> float:
        """Returns the training FLOPs per token, without recomputation; causal attention counts half of ``seq``²."""
        scores = self.qk_dim + self.value_dim
        layers = self.layers + self.mtp_depth
        return 6.0 * self.matmul_params + 6.0 * layers * self.heads * scores * self.mean_keys(seq)


_BF16 = MoEConfig(dtype="bfloat16", remat="full")
_MIXTRAL = replace(_BF16, vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, rope_theta=1e6)
_QWEN3 = replace(_BF16, vocab=151_936, embed=2048, layers=48, heads=32, kv_heads=4, head_dim=128, rope_theta=1e6)
_QWEN3 = replace(_QWEN3, norm_eps=1e-6, qk_norm=True, experts=128, k=8, expert_mlp=768, balance_loss=0.001)
_V3: dict[str, Any] = {"shared_experts": 1, "score": "sigmoid", "scale": 2.5, "bias_rate": 0.001}
_V3 |= {"balance_loss": 0.0001, "balance_per": "sequence"}
_DEEPSEEK = replace(_BF16, vocab=129_280, embed=7168, layers=61, heads=128, kv_heads=128, head_dim=128, mlp=18_432)
_DEEPSEEK = replace(_DEEPSEEK, norm_eps=1e-6, experts=256, k=8, expert_mlp=2048, dense_layers=3, **_V3)
_LATENT = LatentAttentionConfig(kv_latent=512, q_latent=1536, rope_dim=64, value_dim=128)
_DEEPSEEK = replace(_DEEPSEEK, groups=8, groups_per_token=4, latent_attention=_LATENT)
_TINY = MoEConfig(experts=8, k=2, expert_mlp=192)
_TINY_LATENT = LatentAttentionConfig(kv_latent=32, q_latent=48, rope_dim=16, value_dim=32)
_TINY_V3 = replace(_TINY, kv_heads=4, expert_mlp=96, dense_layers=1, groups=4, groups_per_token=2, **_V3)

FAMILIES: dict[str, dict[str, MoEConfig]] = {
    "mixtral": {"tiny": _TINY, "mixtral_8x7b": replace(_MIXTRAL, experts=8, k=2, expert_mlp=14_336)},
    "qwen3_moe": {"tiny": replace(_TINY, k=4, qk_norm=True), "qwen3_30b_a3b": _QWEN3},
    "deepseek_v3": {"tiny": replace(_TINY_V3, latent_attention=_TINY_LATENT), "deepseek_v3_671b": _DEEPSEEK},
}
"""Presets by family: Mixtral (arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388) and DeepSeek-V3 (arXiv:2412.19437)."""


def preset(family: str, name: str = "tiny", **changes: Any) -> MoEConfig:
    """Returns a preset of a family, with ``changes`` applied to its fields.

    Args:
      family: ``mixtral``, ``qwen3_moe`` or ``deepseek_v3``.
      name: ``tiny``, or the name of a published model of the family.
      **changes: values of :class:`MoEConfig` that replace those of the preset.

    Raises:
      ConfigError: no family or preset has this name, or the changed fields do not fit each other.

    >>> f"{preset('mixtral', 'mixtral_8x7b').params:.4g}", f"{preset('deepseek_v3', 'deepseek_v3_671b').params:.4g}"
    ('4.67e+10', '6.71e+11')
    """
    for value, known, what in ((family, FAMILIES, "family"), (name, FAMILIES.get(family, {}), "preset")):
        if value not in [*known]:
            raise ConfigError(f"moe: unknown {what} {value!r}.{did_you_mean(value, known)} Known: {', '.join(known)}.")
    return replace(FAMILIES[family][name], **changes)
