"""What models of other systems have in common: their family, further tokens, and the moments of Adam."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, is_number


def with_family(keys: ConfigKeys, fields: dict[str, Any], experts: dict[str, Any], latent: str) -> dict[str, Any]:
    """Returns ``model`` of a run: its fields, with the family that they make up.

    Args:
      keys: the configuration.
      fields: of the model, without those of its experts.
      experts: those; empty for a dense model.
      latent: the key of latent attention, which is refused without experts.
    """
    if experts:
        family = "deepseek_v3" if "latent_attention" in fields else "qwen3_moe" if fields["qk_norm"] else "mixtral"
        return {"family": family, **fields, **experts}
    if fields.pop("latent_attention", None):
        keys.refuse(latent, "latent attention is only built for models with experts")
    return {"family": "llama", **fields}


def further_tokens(keys: ConfigKeys, depth: str, weight: str, default: float, *, with_experts: bool) -> dict[str, Any]:
    """Returns the number of further tokens that a model predicts, and the weight of their losses; empty without any.

    Args:
      keys: the configuration.
      depth, weight: the keys of both.
      default: of the weight.
      with_experts: whether the model has experts, without which they are refused.
    """
    count = keys.take(depth, "natural", 0, "model.mtp_depth")
    if not count:
        keys.ignore(weight, "no further tokens are predicted")
        return {}
    if not with_experts:
        keys.refuse(depth, "further tokens are only predicted by models with experts")
        return {}
    return {"mtp_depth": count, "mtp_weight": float(keys.take(weight, "number", default, "model.mtp_weight"))}


def read_betas(keys: ConfigKeys, path: str, default: list[float]) -> dict[str, Any]:
    """Returns ``b1`` and ``b2`` of an optimizer.

    Raises:
      ConfigError: they are no two numbers from 0 to below 1.
    """
    betas = keys.take(path, "list", default, "optimizer.options")
    if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise keys.error(path, f"must be two numbers from 0 to below 1, got {betas}")
    return {"b1": betas[0], "b2": betas[1]}
