"""Flax's transposed convolutions on slices: a layer for NNX, an interceptor for Linen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen, nnx

from jaxpar.errors import ConfigError
from jaxpar.parallel.spatial.slices import conv, conv_transpose


class ConvTranspose(nnx.ConvTranspose):
    """Flax's ``nnx.ConvTranspose``, computed slice by slice as :func:`jaxpar.spatial.conv_transpose`.

    Arguments, parameters, their initial values and the results are those of Flax's layer.

    Source: ``flax.nnx.ConvTranspose``.

    >>> import jaxpar as jp
    >>> layer = ConvTranspose(3, 5, (2, 2), strides=(2, 2), rngs=nnx.Rngs(0))
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     layer(jax.numpy.ones((1, 16, 8, 3))).shape
    (1, 32, 16, 5)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the result [..., height, width, out_features] of inputs [..., height, width, in_features].

        Raises:
          NoLayoutError, ConfigError, LayoutError: as :func:`jaxpar.spatial.conv_transpose`, or the mask has another
            shape than the kernel.
        """
        return _apply(self, inputs, self.kernel[...], self.bias[...] if self.bias is not None else None)


def use_slices(model: nnx.Module) -> nnx.Module:
    """Makes the Flax layers of any NNX model compute slice by slice.

    Each ``nnx.Conv`` that has no convolution of its own takes :func:`jaxpar.spatial.conv`, and each
    ``nnx.ConvTranspose`` becomes a :class:`ConvTranspose`. Parameters and their paths stay. Circular convolutions stay
    as they are, because ``nnx.Conv`` pads the whole image by itself. A layer whose windows do not line up with the
    slices, such as overlapping ones with ``"VALID"`` padding, then raises :class:`~jaxpar.errors.LayoutError`.

    Args:
      model: the model, which is changed in place.

    Returns:
      ``model``.

    >>> model = use_slices(nnx.Sequential(nnx.ConvTranspose(3, 5, (2, 2), strides=(2, 2), rngs=nnx.Rngs(0))))
    >>> type(model.layers[0]).__module__
    'jaxpar.parallel.spatial.layers'
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Conv) and module.conv_general_dilated is jax.lax.conv_general_dilated:
            if module.padding not in ("CIRCULAR", "REFLECT", "CAUSAL"):
                module.conv_general_dilated = conv
        elif type(module) is nnx.ConvTranspose:
            object.__setattr__(module, "__class__", ConvTranspose)  # a parent may be any pytree, so keep the object
    return model


def intercept_conv_transpose(
    call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], context: Any
) -> Any:
    """An interceptor with which Linen's ``nn.ConvTranspose`` computes slice by slice: ``flax.linen.intercept_methods``.

    The model stays as it is. Parameters are created by Flax.

    Args:
      call: the method's next interceptor, or the method itself.
      arguments: its arguments.
      options: its arguments by name.
      context: the layer and the name of the method.

    >>> import jaxpar as jp
    >>> layer = linen.ConvTranspose(5, (2, 2), strides=(2, 2))
    >>> variables = layer.init(jax.random.key(0), jax.numpy.ones((1, 16, 8, 3)))
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     with linen.intercept_methods(intercept_conv_transpose):
    ...         layer.apply(variables, jax.numpy.ones((1, 16, 8, 3))).shape
    (1, 32, 16, 5)
    """
    layer = context.module
    transposed = isinstance(layer, linen.ConvTranspose) and context.method_name == "__call__"
    if not transposed or not layer.has_variable("params", "kernel"):
        return call(*arguments, **options)
    return _apply(layer, *arguments, *options.values(), *(_parameter(layer, name) for name in ("kernel", "bias")))


def _parameter(layer: linen.Module, name: str) -> Any:
    return linen.meta.unbox(layer.get_variable("params", name)) if layer.has_variable("params", name) else None


def _apply(layer: Any, inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns a transposed convolution with the options of a Flax layer, NNX or Linen."""
    size = layer.kernel_size
    space = 1 if isinstance(size, int) else len(size)
    batch, image = inputs.shape[: -space - 1], inputs.shape[-space - 1 :]
    if layer.mask is not None:
        if layer.mask.shape != kernel.shape:
            raise ConfigError(
                f"ConvTranspose: the mask has the shape {list(layer.mask.shape)}, but the kernel {list(kernel.shape)}. "
                f"Remedy: a mask in the shape of the kernel."
            )
        kernel = kernel * layer.mask
    arrays = (inputs.reshape(-1, *image), kernel, bias)
    x, kernel, bias = (
        layer.promote_dtype(arrays, dtype=layer.dtype)
        if isinstance(layer, nnx.Module)
        else layer.promote_dtype(*arrays, dtype=layer.dtype)
    )
    y = conv_transpose(
        x,
        kernel,
        _for_each(layer.strides, space),
        _padding(layer.padding, space),
        _for_each(layer.kernel_dilation, space),
        transpose_kernel=layer.transpose_kernel,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
    )
    if bias is not None:
        y += bias
    return y.reshape(*batch, *y.shape[1:])


def _for_each(value: int | Sequence[int] | None, space: int) -> tuple[int, ...]:
    return (value or 1,) * space if value is None or isinstance(value, int) else tuple(value)


def _padding(value: Any, space: int) -> Any:
    """Returns a padding for ``jax.lax.conv_transpose`` of what a Flax layer takes: a number, or one or two of a dim."""
    if isinstance(value, str):
        return value
    each = (value,) * space if isinstance(value, int) else value
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in each)
