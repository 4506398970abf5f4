"""``Layout``: a mesh and its rules; ``constrain`` and ``hint`` apply it inside a model.

``with layout:`` makes a layout ambient. The ambient layout is part of jit's cache key (a jax *user context*): the same
function is traced again under another layout, and hits the cache when the first layout is ambient again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import JaxparError, LayoutError, NoLayoutError, did_you_mean, listing
from jaxpar.sharding import messages
from jaxpar.sharding.hardware.rings import check_rings
from jaxpar.sharding.mesh import ALL_AXES, LayoutData, MeshSpec
from jaxpar.sharding.resolve import Resolved, resolve
from jaxpar.sharding.rules import Rules
from jaxpar.utils.arrays import itemsize
from jaxpar.utils.call_site import call_site
from jaxpar.utils.contexts import ambient_layout, hint_observer
from jaxpar.utils.yaml_config import build, load_yaml

Devices = Sequence[Any] | int | None
_entered = threading.local()


@dataclass(frozen=True)
class Layout:
    """A mesh (concrete or abstract) and the rules that place tensors on it. Frozen and hashable.

    Explicit axes, which ``jax.make_mesh`` creates by default, become Auto axes. With Explicit axes JAX derives the
    sharding of every intermediate value from its operands and rejects programs where this is ambiguous; most models are
    such programs. ``explain`` reports the conversion.

    Attributes:
      mesh: the mesh.
      rules: the rules; every axis that they name is an axis of the mesh or of :class:`jaxpar.MeshSpec`.
      explicit: whether a mesh whose axes are all Explicit keeps them, for a model that is written for them.
      rings: the axes whose devices form closed rings of TPU chips, as ``MeshSpec.build(rings=...)`` places them. A
        program that is compiled ahead of time is placed in the same way, and the roofline counts links accordingly.
      converted: the Explicit axes of the given mesh that are Auto in ``mesh``.

    Raises:
      LayoutError: an argument is of another type, the rules name an axis that neither the mesh nor jaxpar knows, or the
        mesh has Manual axes, or axes that are not Explicit although ``explicit`` is set. The error lists all problems.
      MeshError: one of ``rings`` is no axis of the mesh.

    >>> from jaxpar import MeshSpec, Rules
    >>> layout = Layout(MeshSpec(data=4, model=2).abstract(), Rules(batch="data", mlp="model", embed=None))
    >>> layout.spec(("batch", "mlp"), shape=(8, 6))
    P('data', 'model')
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    explicit: bool = False
    rings: tuple[str, ...] = ()
    converted: tuple[str, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh) or not isinstance(self.rules, Rules):
            got = f"{type(self.mesh).__name__} and {type(self.rules).__name__}"
            raise LayoutError(
                f"Layout() requires a Mesh and Rules, got {got}. Remedy: use Layout(MeshSpec(...).build(), rules)."
            )
        names = self.mesh.axis_names
        check_rings(self.rings, names)
        known = tuple(dict.fromkeys([*names, *ALL_AXES]))
        problems = [
            f"the rule for {where!r} names the mesh axis {axis!r}, which does not exist.{did_you_mean(axis, known)} "
            f"The mesh has {listing(names)}. Remedy: correct the rule, or build a mesh with that axis."
            for where, axis in self.rules.axes()
            if axis not in known
        ]
        kinds = dict(zip(names, self.mesh.axis_types, strict=True))
        found = tuple(axis for axis, kind in kinds.items() if kind is AxisType.Explicit)
        if AxisType.Manual in kinds.values() or (self.explicit and found != names):
            shown = ", ".join(f"{axis}={kind.name}" for axis, kind in kinds.items())
            kind = "Explicit axes only, because explicit is set" if self.explicit else "no Manual axes"
            problems.append(
                f"the mesh must have {kind}, got {shown}. Remedy: use Layout(MeshSpec(...).build(), rules)."
            )
        if problems:
            raise LayoutError(problems)
        if found and not self.explicit:
            vars(self).update(converted=found, mesh=self.mesh.update(axis_types=(AxisType.Auto,) * len(names)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, devices: Devices = None, where: str = "layout") -> Layout:
        """Returns a layout from ``{"mesh": {...}, "rules": {...}}``.

        Args:
          data: the sizes of the mesh axes, the rules, and optionally ``rings``, a list of mesh axes.
          devices: the devices of the mesh, by default ``jax.devices()``; an integer makes an abstract mesh of that
            size.
          where: the prefix of error messages.

        Raises:
          ConfigError: an unknown key or a value of the wrong type.
          JaxparError: as the mesh, the rules and the layout raise; the class of the error is kept.
        """
        parts = build(LayoutData, data, where)
        try:
            spec = MeshSpec.from_dict(parts.mesh or {})
            rings = tuple(parts.rings)
            mesh = spec.abstract(devices) if isinstance(devices, int) else spec.build(devices, rings=rings)
            return cls(mesh, Rules.from_dict(parts.rules or {}), rings=rings)
        except JaxparError as error:
            raise type(error)(f"{where}: {error}") from error

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], *, devices: Devices = None) -> Layout:
        """Returns a layout from a YAML file with the keys ``mesh``, ``rules`` and optionally ``rings``.

        Args:
          path: the file.
          devices: as for :meth:`from_dict`.

        Raises:
          ConfigError: the file cannot be read, or is not YAML.
          JaxparError: as :meth:`from_dict` raises.

        >>> Layout.from_yaml("configs/layouts/fsdp.yaml", devices=16).sizes["data"]
        16
        """
        return cls.from_dict(load_yaml(path), devices=devices, where=os.fspath(path))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return dict(self.mesh.shape)

    def resolve(
        self, dims: Sequence[str | None], shape: Sequence[int] | None = None, *, dtype: Any = np.float32, **options: str
    ) -> Resolved:
        """Returns the sharding of a tensor, with a reason per dim and a list of problems instead of an exception.

        Args:
          dims: one logical dim (or ``None``) per dim of the tensor.
          shape: the tensor's shape. Without it divisibility is not checked and ``over`` does not apply.
          dtype: the tensor's dtype; ``over`` compares the tensor's bytes with ``min_bytes``.
          **options: ``role``, whose rules apply: ``activations`` (the default), ``params``, ``gradients`` or
            ``optimizer``; and ``path``, the tensor's name in problem texts.

        Raises:
          RulesError: an unknown role.

        See :func:`jaxpar.sharding.resolve.resolve`.
        """
        return resolve(self.rules, self.sizes, tuple(dims), shape, itemsize=itemsize(dtype), **options)

    def spec(self, dims: Sequence[str | None], shape: Sequence[int] | None = None, **options: Any) -> PartitionSpec:
        """Returns the ``PartitionSpec`` of a tensor with these logical dims. Options are those of :meth:`resolve`.

        Raises:
          LayoutError: an unknown dim, a rank other than the number of names, an indivisible dim, or an axis that two
            dims claim. The error lists all problems.
          RulesError: an unknown role.
        """
        resolved = self.resolve(dims, shape, **options)
        if resolved.problems:
            raise LayoutError(resolved.problems)
        return to_spec(resolved)

    def sharding(self, dims: Sequence[str | None], shape: Sequence[int] | None = None, **options: Any) -> NamedSharding:
        """Returns the ``NamedSharding`` of a tensor with these logical dims. Options are those of :meth:`resolve`.

        Raises:
          LayoutError: as :meth:`spec`.
          RulesError: an unknown role.
        """
        return NamedSharding(self.mesh, self.spec(dims, shape, **options))

    def on_one_device(self) -> Layout:
        """Returns the same rules on a one-device mesh with the same axes, as the reference for this layout."""
        device = np.asarray(jax.devices()[:1]).reshape((1,) * len(self.mesh.axis_names))
        return replace(self, mesh=Mesh(device, self.mesh.axis_names, axis_types=self.mesh.axis_types))

    def __enter__(self) -> Self:
        stack = ExitStack()
        enter: Any = jax.sharding.use_abstract_mesh if isinstance(self.mesh, AbstractMesh) else jax.set_mesh
        stack.enter_context(enter(self.mesh))
        stack.enter_context(ambient_layout(self))
        _entered.stacks = [*getattr(_entered, "stacks", []), stack]
        return self

    def __exit__(self, *exc: object) -> None:
        *_entered.stacks, stack = _entered.stacks
        stack.close()


def to_spec(resolved: Resolved) -> PartitionSpec:
    """Returns the ``PartitionSpec`` of a resolved tensor."""
    return PartitionSpec(*resolved.axes)


def current_layout() -> Layout:
    """Returns the ambient layout.

    Raises:
      NoLayoutError: no layout is ambient.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(data=4, model=2).build(), jp.Rules(batch="data")):
    ...     current_layout().sizes["model"]
    2
    """
    layout: Layout | None = ambient_layout.value
    if layout is None:
        raise NoLayoutError(
            "no active layout, but constrain() and hint() need one. Remedy: run inside 'with layout:', or call the "
            "model through train_step(layout, ...); or, to run the model as plain JAX, inside 'with jp.unsharded():'."
        )
    return layout


@contextmanager
def tracing_under(layout: Layout) -> Iterator[None]:
    """Makes ``layout`` ambient inside a function that jit is already tracing, where ``jax.set_mesh`` may not be called.

    Raises:
      LayoutError: another layout is already ambient.
    """
    outer = ambient_layout.value
    if outer is not None and outer != layout:
        rules = " and other rules" if layout.rules != outer.rules else ""
        raise LayoutError(
            f"a step made for the mesh {layout.sizes} runs inside a 'with' of the mesh {outer.sizes}{rules}. Remedy: "
            f"make the step with the layout it runs under, or leave the 'with'."
        )
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh), ambient_layout(layout):
        yield


def constrain[T](x: T, *dims: str | None) -> T:
    """Returns ``x`` sharded by the ambient layout's activation rules for its logical dims.

    Args:
      x: an array, inside or outside jit.
      *dims: one logical dim (or ``None``) per dim of ``x``.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: an unknown dim, a rank other than the number of names, an indivisible dim, an axis that two dims
        claim, or an axis that an enclosing ``shard_map`` has made manual.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None)):
    ...     constrain(jnp.ones((8, 4)), "batch", "embed").sharding.spec
    P('data', None)
    """
    return _apply(x, dims, lenient=False)


def hint[T](x: T, *dims: str | None, role: str = "activations") -> T:
    """Returns ``x`` sharded as by :func:`constrain`, but ignores axes that an enclosing ``shard_map`` has made manual.

    Args:
      x: an array, inside or outside jit.
      *dims: one logical dim (or ``None``) per dim of ``x``.
      role: the role whose rules apply; see :class:`jaxpar.Rules`.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: as :func:`constrain`, except for manual axes.
      RulesError: an unknown role.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), jp.Rules(batch="data", embed="model"))
    >>> with layout:  # in the shard_map over ``data``, ``batch`` is local and ``embed`` is sharded
    ...     double = jax.shard_map(lambda x: 2 * hint(x, "batch", "embed"), in_specs=P("data"), out_specs=P("data"),
    ...                            axis_names={"data"})
    ...     jax.jit(double)(jnp.ones((8, 4))).sharding.spec
    P('data', 'model')
    """
    return _apply(x, dims, lenient=True, role=role)


def _apply(x: Any, dims: Sequence[str | None], *, lenient: bool, role: str = "activations") -> Any:
    layout = current_layout()
    context = jax.sharding.get_abstract_mesh()
    manual = context.manual_axes
    site = call_site()
    path = f"{'hint' if lenient else 'constrain'}() in {site}"
    sizes = {axis: size for axis, size in layout.sizes.items() if axis not in manual}
    resolved = resolve(layout.rules, sizes, dims, x.shape, role=role, itemsize=itemsize(x.dtype), path=path)
    if manual and not lenient:
        # Inside a shard_map x has the shape of one shard, so the rules are resolved without a shape.
        where = messages.tensor(path, dims, x.shape)
        found = [
            f"{where}: the dim {dim.name!r} is sharded over {axis!r}, which is manual inside this shard_map (rule "
            f"{dim.rule}). Remedy: use hint(), which leaves this axis out."
            for dim in layout.resolve(dims).dims
            for axis in dim.axes
            if axis in manual
        ]
        resolved = replace(resolved, problems=(*resolved.problems, *found))
    if hint_observer.value is not None:
        hint_observer.value(site, dims, x, resolved)
    elif resolved.problems:
        raise LayoutError(resolved.problems)
    if resolved.problems or context.empty:  # without a mesh, as in unsharded(), there is nothing to shard over
        return x
    # Only the context knows which axes are manual. Only the layout's own mesh has devices, which an eager call needs.
    return with_sharding(context if manual else layout.mesh, x, to_spec(resolved))


def with_sharding(mesh: Mesh | AbstractMesh, x: Any, spec: PartitionSpec) -> Any:
    """Returns ``x`` sharded by ``spec``, by the call that the mesh's axis types require."""
    sharding = NamedSharding(mesh, spec)
    # With Explicit axes with_sharding_constraint only asserts; with Auto axes reshard raises.
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else jax.lax.with_sharding_constraint(x, sharding)


def manual_axes(layout: Layout, axes: Iterable[str], *, but: Container[str] = ()) -> set[str]:
    """The ``axis_names`` of a ``shard_map`` over ``axes``: these and all axes of size 1, except ``but``.

    An axis of size 1 that stays automatic would leave its name in the compiled program's shardings.
    """
    return {*axes, *(axis for axis, size in layout.sizes.items() if size == 1 and axis not in but)}
