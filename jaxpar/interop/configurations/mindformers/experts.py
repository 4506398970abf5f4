"""The experts of a MindFormers configuration: ``moe_config``, or the same keys in ``model_config``."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, is_number
from jaxpar.interop.configurations.mindformers.ignored import MOE_IGNORED, MOE_NEUTRAL

_EXPERTS = ("expert_num", "n_routed_experts", "num_experts", "num_moe_experts")
_CHOSEN = ("num_experts_chosen", "num_experts_per_tok", "moe_router_topk")
_WIDTH = ("moe_intermediate_size", "moe_ffn_hidden_size")
_BIAS = ("balance_via_topk_bias", "moe_router_enable_expert_bias")
_RATE = ("topk_bias_update_rate", "moe_router_bias_update_rate")
_LOSS = ("aux_loss_factor", "moe_aux_loss_coeff", "router_aux_loss_coef")
_ROUTING = (
    (("routed_scaling_factor", "moe_router_topk_scaling_factor"), "number", "scale", 1.0),
    (("n_group", "moe_router_num_groups"), "count", "groups", 1),
    (("topk_group", "moe_router_group_topk"), "count", "groups_per_token", 1),
    (("norm_topk_prob",), "bool", "normalize", True),
    (("shared_expert_num", "n_shared_experts"), "natural", "shared_experts", 0),
    (("z_loss_factor", "moe_z_loss_coeff"), "number", "z_loss", 0.0),
)


class _Mixture:
    """Keys that stand in ``moe_config`` or in ``model_config``."""

    def __init__(self, keys: ConfigKeys, prefix: str):
        self.keys, self.prefixes = keys, ("moe_config.", prefix)

    def path(self, *names: str) -> str:
        return self.keys.first([f"{prefix}{name}" for prefix in self.prefixes for name in names])


def read_experts(keys: ConfigKeys, prefix: str, dense: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a ``MoEConfig`` that a dense model does not have; empty for a dense model.

    Args:
      keys: the configuration.
      prefix: of the model's keys.
      dense: the other fields of the model.

    Raises:
      ConfigError: more experts are chosen than there are, or a factor is out of its range.
    """
    for where in ("moe_config.", prefix):
        keys.ignore_all(MOE_IGNORED, where)
        keys.neutral_all(MOE_NEUTRAL, where)
    mixture = _Mixture(keys, prefix)
    experts = mixture.path(*_EXPERTS)
    count = keys.take(experts, "count", 1, "model.experts")
    if count == 1:
        keys.ignore_each((experts, "moe_config"), "one expert: the model is dense")
        return {}
    chosen = mixture.path(*_CHOSEN)
    k = keys.take(chosen, "count", 1, "model.k")
    if k > count:
        raise keys.error(chosen, f"must be at most {experts}={count}, got {k}", f"use {count} or fewer")
    fields: dict[str, Any] = {
        "experts": count,
        "k": k,
        "expert_mlp": keys.take(mixture.path(*_WIDTH), "count", dense["mlp"], "model.expert_mlp"),
        "score": _score(mixture),
        "dense_layers": _dense_layers(mixture),
    }
    for names, kind, target, default in _ROUTING:
        fields[target] = keys.take(mixture.path(*names), kind, default, f"model.{target}")  # type: ignore[arg-type]
    return fields | _balance(mixture) | _capacity(mixture) | _shared(mixture, fields)


def _score(mixture: _Mixture) -> str:
    keys, gate = mixture.keys, mixture.path("use_gating_sigmoid")
    name = mixture.path("scoring_func", "moe_router_score_function")
    score = keys.take(name, "text", "sigmoid" if keys.get(gate, "bool", False) else "softmax", "model.score")
    keys.translate(gate, "model.score")
    if score not in ("softmax", "sigmoid"):
        raise keys.error(name, f"must be softmax or sigmoid, got {score!r}")
    return str(score)


def _dense_layers(mixture: _Mixture) -> int:
    path = mixture.path("first_k_dense_replace")
    if isinstance(mixture.keys.raw(path), bool):
        mixture.keys.ignore(path, "not a number of layers")
        return 0
    return int(mixture.keys.take(path, "natural", 0, "model.dense_layers"))


def _balance(mixture: _Mixture) -> dict[str, Any]:
    """The losses and the bias that balance the load of the experts."""
    keys, loss = mixture.keys, mixture.path(*_LOSS)
    factor = keys.take(loss, "number", 0.05, "model.balance_loss")
    if not 0 <= factor < 1:
        raise keys.error(loss, f"must be at least 0 and less than 1, got {factor:g}")
    fields: dict[str, Any] = {"balance_loss": float(factor), "balance_per": "batch"}
    kinds, factors = mixture.path("aux_loss_types"), mixture.path("aux_loss_factors")
    if keys.has(kinds):
        fields |= _losses(keys, kinds, factors)
        keys.ignore(loss, f"{kinds} sets the losses")
    kind = mixture.path("moe_router_load_balancing_type")
    if keys.has(kind):
        name = keys.take(kind, "text", None, "model.balance_per")
        if name == "none":
            fields["balance_loss"] = 0.0
        elif name in ("aux_loss", "seq_aux_loss"):
            fields["balance_per"] = "batch" if name == "aux_loss" else "sequence"
        else:
            keys.refuse(kind, "only aux_loss, seq_aux_loss and none are built")
    switch, rate = mixture.path(*_BIAS), mixture.path(*_RATE)
    fields["bias_rate"] = None
    if keys.take(switch, "bool", False, "model.bias_rate"):
        fields["bias_rate"] = float(keys.take(rate, "number", 0.001, "model.bias_rate")) or None
    else:
        keys.ignore(rate, "no bias balances the experts")
    return fields


def _losses(keys: ConfigKeys, kinds: str, factors: str) -> dict[str, Any]:
    names, weights = keys.get(kinds, "list"), keys.get(factors, "list")
    if weights is None or len(names) != len(weights):
        raise keys.error(factors, f"must have one number for each of {kinds}={names}, got {weights}")
    if not all(is_number(weight) for weight in weights):
        raise keys.error(factors, f"must be numbers, got {weights}")
    unknown = [name for name in names if name not in ("expert", "device", "comm")]
    if unknown:
        raise keys.error(kinds, f"must be of expert, device and comm, got {unknown[0]!r}")
    given = dict(zip(names, weights, strict=True))
    keys.translate(kinds, "model.balance_loss")
    keys.translate(factors, "model.balance_loss")
    if any(given.get(name) for name in ("device", "comm")):
        keys.refuse(kinds, "only the balance of experts is built, not that of devices and communication")
    return {"balance_loss": float(given.get("expert", 0.0)), "balance_per": "sequence"}


def _capacity(mixture: _Mixture) -> dict[str, Any]:
    keys, path = mixture.keys, mixture.path("capacity_factor", "moe_expert_capacity_factor")
    grouped = mixture.path("use_gmm", "moe_grouped_gemm")
    if keys.take(grouped, "bool", False, "model.capacity_factor", "grouped matmuls drop no tokens"):
        keys.ignore(path, f"{grouped} is true: no tokens are dropped")
        return {"capacity_factor": None}
    default = 1.1 if keys.has("moe_config") else -1.0
    factor = keys.take(path, "number", default, "model.capacity_factor", "drops by the same capacity of each expert")
    return {"capacity_factor": float(factor) if factor > 0 else None}


def _shared(mixture: _Mixture, fields: dict[str, Any]) -> dict[str, Any]:
    """Shared experts, where the file gives their total width instead of their number."""
    keys, path = mixture.keys, mixture.path("moe_shared_expert_intermediate_size")
    width = keys.take(path, "count", None, "model.shared_experts")
    if width is None:
        return {}
    number, rest = divmod(width, fields["expert_mlp"])
    if rest or fields["shared_experts"] not in (0, number):
        raise keys.error(path, f"must be a multiple of the width {fields['expert_mlp']} of an expert, got {width}")
    return {"shared_experts": number}
