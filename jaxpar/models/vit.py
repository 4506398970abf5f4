"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) in Linen, with mean pooling, no class token.

It uses the same logical dims as the Llama, so every layout of ``configs/layouts`` serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpar import hint
from jaxpar.linen import axes
from jaxpar.models.losses import cross_entropy

_NORMAL = nn.initializers.truncated_normal(0.02)
_ZEROS = nn.initializers.zeros
_ONES = nn.initializers.ones


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT. Images [batch, image, image, channels] are cut into (image / patch)² patches.

    Attributes:
      image: height and width of an image, in pixels; a multiple of ``patch``.
      patch: height and width of a patch, in pixels.
      channels: channels of a pixel.
      classes: number of classes.
      embed: width of the residual stream; a multiple of ``heads``.
      layers: number of encoder blocks.
      heads: attention heads.
      mlp: hidden width of the MLP.
      dtype: the compute dtype; parameters are fp32.

    >>> config = ViTConfig(image=32, patch=8)
    >>> (config.image // config.patch) ** 2
    16
    """

    image: int = 16
    patch: int = 4
    channels: int = 3
    classes: int = 16
    embed: int = 64
    layers: int = 2
    heads: int = 4
    mlp: int = 128
    dtype: str = "float32"


class EncoderBlock(nn.Module):
    """Pre-norm transformer layer with the ``(carry, _)`` signature that ``nn.scan`` requires."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x_BSE: jax.Array, _: None) -> tuple[jax.Array, None]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        h_BSE = hint(_norm(dtype)(x_BSE), "batch", "seq", "embed")
        h_BSE = nn.MultiHeadDotProductAttention(
            num_heads=c.heads,
            dtype=dtype,
            kernel_init=axes(_NORMAL)("embed", "heads", "head_dim"),
            bias_init=axes(_ZEROS)("heads", "head_dim"),
            out_kernel_init=axes(_NORMAL)("heads", "head_dim", "embed"),
            out_bias_init=axes(_ZEROS)("embed"),
        )(h_BSE)
        x_BSE = x_BSE + hint(h_BSE, "batch", "residual_seq", "embed")
        h_BSE = hint(_norm(dtype)(x_BSE), "batch", "seq", "embed")
        h_BSM = hint(_dense(c.mlp, dtype, "embed", "mlp")(h_BSE), "batch", "seq", "mlp")
        h_BSE = _dense(c.embed, dtype, "mlp", "embed")(nn.gelu(h_BSM))
        return x_BSE + hint(h_BSE, "batch", "residual_seq", "embed"), None


class ViT(nn.Module):
    """A ViT: maps images [batch, image, image, channels] to class logits [batch, classes]."""

    config: ViTConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        batch, side = images.shape[0], c.image // c.patch
        patches = images.reshape(batch, side, c.patch, side, c.patch, c.channels).swapaxes(2, 3)
        patches = hint(patches.reshape(batch, side * side, -1), "batch", "seq", None)
        x_BSE = _dense(c.embed, dtype, None, "embed")(patches)
        x_BSE = x_BSE + self.param("positions", axes(_NORMAL)(None, "embed"), (side * side, c.embed))
        blocks = nn.scan(
            EncoderBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BSE, _ = blocks(c, name="blocks")(hint(x_BSE, "batch", "residual_seq", "embed"), None)
        pooled_BE = hint(_norm(dtype)(x_BSE).mean(axis=1), "batch", "embed")
        return hint(_dense(c.classes, dtype, "embed", "vocab")(pooled_BE), "batch", "vocab")


def _norm(dtype: Any) -> nn.LayerNorm:
    return nn.LayerNorm(dtype=dtype, scale_init=axes(_ONES)("norm"), bias_init=axes(_ZEROS)("norm"))


def _dense(features: int, dtype: Any, *dims: str | None) -> nn.Dense:
    bias = axes(_ZEROS)(dims[-1])
    return nn.Dense(features, dtype=dtype, kernel_init=axes(_NORMAL)(*dims), bias_init=bias)


def make_vit(config: ViTConfig) -> Callable[[jax.Array], Any]:
    """Returns the ``make_model`` of a :class:`ViT` for :func:`jaxpar.init`; it makes the Linen variables.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=8)
    >>> jp.abstract_state(layout, make_vit(ViTConfig(layers=1)), optax.sgd(0.1)).params["positions"].shape
    (16, 64)
    """
    example = jnp.zeros((1, config.image, config.image, config.channels))
    return lambda key: ViT(config).init(key, example)


def vit_loss(config: ViTConfig) -> Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns a ``loss_fn`` on batches of ``images`` and ``labels`` [batch] int.

    Args:
      config: the sizes of the model.

    Returns:
      ``loss_fn(variables, batch) -> (loss, aux)``. ``images`` are [batch, image, image, channels] float. The loss is
      the mean cross entropy in nats; ``aux`` holds ``accuracy``, the fraction of correct predictions.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> layout, config = jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=8), ViTConfig(layers=1)
    >>> state = jp.abstract_state(layout, make_vit(config), optax.sgd(0.1))
    >>> batch = {"images": jnp.ones((8, 16, 16, 3)), "labels": jnp.zeros(8, int)}
    >>> sorted(jax.eval_shape(jp.eval_step(layout, vit_loss(config)), state, batch))
    ['accuracy', 'loss']
    """

    def loss_fn(variables: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits_BV = ViT(config).apply(variables, batch["images"])
        right = jnp.mean(jnp.argmax(logits_BV, axis=-1) == batch["labels"])
        return cross_entropy(logits_BV[:, None], batch["labels"][:, None]), {"accuracy": right}

    return loss_fn


def init_vit(key: jax.Array, **sizes: Any) -> Any:
    """Returns the variables of a ViT of the sizes of :class:`ViTConfig`; ``model.factory`` of a configuration names it.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=8)
    >>> jp.abstract_state(layout, lambda key: init_vit(key, embed=32), optax.sgd(0.1)).params["positions"].shape
    (16, 32)
    """
    return make_vit(ViTConfig(**sizes))(key)


def classification_loss(variables: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of :func:`vit_loss` for variables of any sizes, which their shapes and the images tell.

    Args:
      variables: those of :func:`init_vit`; their dtype is the compute dtype.
      batch: ``images`` [batch, image, image, channels] float and ``labels`` [batch] int.

    Returns:
      The mean cross entropy in nats, and ``{"accuracy": ...}``.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=8)
    >>> state = jp.abstract_state(layout, lambda key: init_vit(key, layers=1), optax.sgd(0.1))
    >>> batch = {"images": jnp.ones((8, 16, 16, 3)), "labels": jnp.zeros(8, int)}
    >>> sorted(jax.eval_shape(jp.eval_step(layout, classification_loss), state, batch))
    ['accuracy', 'loss']
    """
    params = nn.unbox(variables)["params"]
    layers, embed, heads, _ = params["blocks"]["MultiHeadDotProductAttention_0"]["query"]["kernel"].shape
    (_, _, image, channels), (pixels, _) = batch["images"].shape, params["Dense_0"]["kernel"].shape
    patch, classes = round((pixels / channels) ** 0.5), params["Dense_1"]["kernel"].shape[1]
    mlp, dtype = params["blocks"]["Dense_0"]["kernel"].shape[-1], str(params["positions"].dtype)
    config = ViTConfig(image, patch, channels, classes, embed, layers, heads, mlp, dtype)
    return vit_loss(config)(variables, batch)
