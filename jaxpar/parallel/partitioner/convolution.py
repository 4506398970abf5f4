"""Convolutions of a traced program, forward and backward, that run slice by slice instead of as XLA partitions them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError
from jaxpar.parallel.spatial.conv import Convolution
from jaxpar.parallel.spatial.halo import Halo, exchange_halo
from jaxpar.sharding.rules import Axes, Sizes
from jaxpar.utils.arrays import at_least_fp32


@dataclass(frozen=True)
class SlicedConvolution:
    """A convolution whose operands are sharded over manual axes.

    A spatial dim is sharded in input and result, where windows move over slices, or in input and kernel: the gradient
    of a kernel uses the gradient of the result as its kernel, and each device sums over its slice.

    Attributes:
      conv: the convolution of whole arrays.
      shapes: of input, kernel and result.
      space: the axes of each spatial dim.
      by_kernel: for each spatial dim, whether the kernel is sharded and not the result.
      rows: the axes of the batch.
      summed_rows: whether the batch is summed over: it is then the feature dim of input and kernel.
    """

    conv: Convolution
    shapes: tuple[tuple[int, ...], ...]
    space: tuple[Axes, ...]
    by_kernel: tuple[bool, ...]
    rows: Axes = ()
    summed_rows: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, *args: Any) -> SlicedConvolution:
        """Returns the convolution of an equation; further arguments are the attributes after ``shapes``."""
        avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        lhs, rhs, out = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        options = {name: value for name, value in eqn.params.items() if name != "out_sharding"}
        conv = Convolution.of(lhs, rhs, **options)
        return cls(conv, (lhs.shape, rhs.shape, out.shape), *args)

    def problem(self, sizes: Sizes) -> str:
        """Returns why slices cannot be computed by themselves, or an empty text.

        Args:
          sizes: of the mesh axes.
        """
        manual = self._manual()
        if len(set(manual)) < len(manual):
            return "an axis shards two dims"
        for shape, dims in zip(self.shapes, self.dims(), strict=True):
            for size, axes in zip(shape, dims, strict=True):
                if axes and size % math.prod(sizes[axis] for axis in axes):
                    return f"{'+'.join(axes)} does not divide a dim of {size}"
        for i, axes in enumerate(self.space):
            if not axes:
                continue
            count = math.prod(sizes[axis] for axis in axes)
            try:
                halo = self._halo(i, count)
            except LayoutError as error:
                return str(error).partition(" Remedy:")[0]
            if max(halo.before, halo.after) > self._size(i) // count:
                return "a window reads beyond the slice of a neighbour"
        return ""

    def dims(self) -> tuple[tuple[Axes, ...], ...]:
        """Returns the axes of each dim of input, kernel and result."""
        lhs, rhs, out = self.conv.numbers
        axes: list[dict[int, Axes]] = [{}, {}, {}]
        if self.summed_rows:
            axes[0][lhs[1]] = axes[1][rhs[1]] = self.rows
        else:
            axes[0][lhs[0]] = axes[2][out[0]] = self.rows
        for own, by_kernel, i, j, k in zip(self.space, self.by_kernel, lhs[2:], rhs[2:], out[2:], strict=True):
            axes[0][i] = own
            axes[1 if by_kernel else 2][j if by_kernel else k] = own
        return tuple(
            tuple(own.get(dim, ()) for dim in range(len(shape))) for own, shape in zip(axes, self.shapes, strict=True)
        )

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Returns the result of whole arrays; each device computes its slice."""
        mesh = jax.sharding.get_abstract_mesh()
        axes = {axis for axis, size in mesh.shape.items() if size == 1 and axis not in mesh.manual_axes}
        *operands, out = (PartitionSpec(*dims) for dims in self.dims())
        run = jax.shard_map(
            self._local,
            in_specs=tuple(operands),
            out_specs=out,
            axis_names={*axes, *self._manual()},
            check_vma=False,
        )
        result: jax.Array = run(lhs, rhs)
        return result

    def _local(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        paddings = [window.padding for window in self.conv.windows]
        totals = self.rows if self.summed_rows else ()
        for i, axes in enumerate(self.space):
            if axes:
                halo = self._halo(i, jax.lax.axis_size(axes))
                lhs = exchange_halo(lhs, self.conv.numbers.lhs_spec[2 + i], axes, halo.before, halo.after)
                paddings[i] = halo.padding
                totals += axes if self.by_kernel[i] else ()
        if not totals:
            return self.conv(lhs, rhs, paddings)
        out = jax.eval_shape(lambda x, w: self.conv(x, w, paddings), lhs, rhs)
        # Sums over devices are in fp32: a 16-bit sum beside automatic axes aborts XLA:CPU.
        wide = at_least_fp32(jnp.zeros((), out.dtype)).dtype
        return jax.lax.psum(self.conv(lhs, rhs, paddings, preferred_element_type=wide), totals).astype(out.dtype)

    def _manual(self) -> list[str]:
        return [*self.rows, *(axis for axes in self.space for axis in axes)]

    def _size(self, i: int) -> int:
        return self.shapes[0][self.conv.numbers.lhs_spec[2 + i]]

    def _halo(self, i: int, count: int) -> Halo:
        window = self.conv.windows[i]
        return (window.halo_of_parts if self.by_kernel[i] else window.halo)(self._size(i), count)
