"""A U-Net for images and volumes (Ronneberger et al. 2015, arXiv:1505.04597) in Flax NNX, whose space may be sharded.

Blocks of two 3-wide convolutions with group norm; each level halves the size and doubles the channels. ``configs/
layouts/sliced.yaml`` shards the height and the width: convolutions and pooling then exchange halos
(:mod:`jaxpar.spatial`), and group norm takes its statistics over the whole image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import hint
from jaxpar.errors import ConfigError
from jaxpar.nnx import axes
from jaxpar.parallel.spatial.layers import ConvTranspose
from jaxpar.parallel.spatial.slices import SPATIAL_DIMS, conv, max_pool

_LECUN, _ZEROS, _ONES = nnx.initializers.lecun_normal(), nnx.initializers.zeros, nnx.initializers.ones


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net. Images are [batch, height, width, in_channels], volumes [batch, depth, height, width, ...].

    Attributes:
      space: 2 for images, 3 for volumes.
      in_channels: channels of the input.
      classes: classes of a pixel.
      channels: channels of the first level; a multiple of ``groups``.
      levels: number of levels; sizes are multiples of ``2 ** (levels - 1)``.
      groups: groups of the group norm.
      dtype: the compute dtype; parameters are fp32.
      remat: whether the backward pass computes each block again.

    Raises:
      ConfigError: a size is out of range.

    >>> UNetConfig(channels=16, levels=3).widths
    (16, 32, 64)
    """

    space: int = 2
    in_channels: int = 1
    classes: int = 4
    channels: int = 16
    levels: int = 3
    groups: int = 4
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        if self.space not in (2, 3):
            raise ConfigError(f"unet: space must be 2 (images) or 3 (volumes), got {self.space}.")
        if self.levels < 1 or self.channels % self.groups:
            raise ConfigError(
                f"unet: channels must be a multiple of groups and levels at least 1, got channels={self.channels}, "
                f"groups={self.groups} and levels={self.levels}. Remedy: such as channels=16, groups=4, levels=3."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of each level."""
        return tuple(self.channels * 2**level for level in range(self.levels))

    @property
    def dims(self) -> tuple[str, ...]:
        """The logical dims of an activation."""
        return ("batch", *SPATIAL_DIMS[self.space], "channels")


class ConvBlock(nnx.Module):
    """Two convolutions, each followed by group norm and SiLU."""

    def __init__(self, c: UNetConfig, before: int, after: int, rngs: nnx.Rngs):
        self.dims = c.dims
        self.convs = nnx.List([_conv(c, size, after, 3, rngs) for size in (before, after)])
        norm = {"scale_init": axes(_ONES)("channels"), "bias_init": axes(_ZEROS)("channels")}
        self.norms = nnx.List(
            [nnx.GroupNorm(after, num_groups=c.groups, dtype=c.dtype, rngs=rngs, **norm) for _ in range(2)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.convs, self.norms, strict=True):
            x = hint(nnx.silu(norm(layer(x))), *self.dims)
        return x


class UNet(nnx.Module):
    """A U-Net: maps images [batch, ..., in_channels] to the logits of each pixel's class [batch, ..., classes]."""

    def __init__(self, c: UNetConfig, rngs: nnx.Rngs):
        self.config = c
        widths = c.widths
        self.down = nnx.List([ConvBlock(c, a, b, rngs) for a, b in zip((c.in_channels, *widths), widths, strict=False)])
        self.up = nnx.List([_upsample(c, 2 * width, width, rngs) for width in widths[:-1]])
        self.merge = nnx.List([ConvBlock(c, 2 * width, width, rngs) for width in widths[:-1]])
        self.head = _conv(c, c.channels, c.classes, 1, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        run = nnx.remat(ConvBlock.__call__) if c.remat else ConvBlock.__call__
        x, skips = hint(x.astype(c.dtype), *c.dims[:-1], None), list[jax.Array]()
        for block in self.down:
            if skips:
                x = max_pool(x, (2,) * c.space, (2,) * c.space)
            x = run(block, x)
            skips.append(x)
        for skip, upsample, block in reversed(list(zip(skips[:-1], self.up, self.merge, strict=True))):
            x = hint(upsample(x), *c.dims)
            x = run(block, jnp.concatenate([skip, x], axis=-1))
        return self.head(x).astype(jnp.float32)


def _conv(c: UNetConfig, before: int, after: int, size: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        before,
        after,
        (size,) * c.space,
        kernel_init=axes(_LECUN)(*(None,) * c.space, None, "channels"),
        bias_init=axes(_ZEROS)("channels"),
        dtype=c.dtype,
        conv_general_dilated=conv,
        rngs=rngs,
    )


def _upsample(c: UNetConfig, before: int, after: int, rngs: nnx.Rngs) -> ConvTranspose:
    """Doubles the size; its windows do not overlap, so that slices need no halo."""
    return ConvTranspose(
        before,
        after,
        (2,) * c.space,
        strides=(2,) * c.space,
        kernel_init=axes(_LECUN)(*(None,) * c.space, None, "channels"),
        bias_init=axes(_ZEROS)("channels"),
        dtype=c.dtype,
        rngs=rngs,
    )


def make_unet(key: jax.Array, **sizes: Any) -> UNet:
    """Returns a :class:`UNet` of the sizes of :class:`UNetConfig`; ``model.factory`` of a configuration names it.

    >>> import optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout.from_yaml("configs/layouts/sliced.yaml", devices=8)
    >>> state = jp.abstract_state(layout, lambda key: make_unet(key, channels=8, levels=2), optax.sgd(0.1))
    >>> state.params["head"]["kernel"].shape
    (1, 1, 8, 4)
    """
    return UNet(UNetConfig(**sizes), nnx.Rngs(key))


def segmentation_loss(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross entropy of the pixels' classes in nats, and the share of right pixels.

    Args:
      model: maps images to logits [batch, ..., classes].
      batch: ``image`` [batch, ..., channels] and ``label`` [batch, ...] int.

    >>> batch = {"image": jnp.ones((2, 8, 8, 1)), "label": jnp.zeros((2, 8, 8), int)}
    >>> loss, aux = segmentation_loss(lambda image: jnp.zeros((*image.shape[:-1], 4)), batch)
    >>> round(float(loss), 4), float(aux["accuracy"])
    (1.3863, 1.0)
    """
    logits, label = model(batch["image"]), batch["label"]
    right = jnp.mean(jnp.argmax(logits, axis=-1) == label)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.sum(jnp.where(label[..., None] == jnp.arange(logits.shape[-1]), log_probs, 0), axis=-1)
    return -jnp.mean(chosen), {"accuracy": right}
