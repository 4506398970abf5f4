"""``Layout``: a mesh and a rules table, the one noun a user carries; and the two verbs that apply it inside a model.

``with layout:`` makes it ambient. The ambient layout is part of jit's cache key (a jax *user context*), so the same
function under another layout is traced again, and under the first one again it is a cache hit.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import JaxparError, LayoutError, NoLayoutError
from jaxpar.sharding import messages
from jaxpar.sharding.mesh import AXES, MeshSpec
from jaxpar.sharding.resolve import Resolved, resolve
from jaxpar.sharding.rules import Rules
from jaxpar.utils.contexts import ambient_layout, hint_observer
from jaxpar.utils.yaml_config import build, load_yaml

Devices = Sequence[Any] | int | None
_entered = threading.local()
# Through these a call comes from the model, which is what an error or a report should name.
_LIBRARIES = re.compile(r"(jaxpar(?!\.models)|jax|flax|functools)(\.|$)")


@dataclass(frozen=True)
class _Data:
    """A layout as YAML holds it."""

    mesh: dict[str, Any] | None
    rules: dict[str, Any] | None


@dataclass(frozen=True)
class Layout:
    """A mesh (concrete or abstract) and the rules that place tensors on it. Frozen and hashable.

    Raises:
      LayoutError: not a mesh and rules, an axis in the rules that neither the mesh nor jaxpar knows, mixed axis types.

    >>> from jaxpar import MeshSpec, Rules
    >>> layout = Layout(MeshSpec(data=4, model=2).abstract(), Rules(batch="data", mlp="model", embed=None))
    >>> layout.spec(("batch", "mlp"), shape=(8, 6))
    P('data', 'model')
    """

    mesh: Mesh | AbstractMesh
    rules: Rules

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh) or not isinstance(self.rules, Rules):
            raise LayoutError(messages.not_a_layout(self.mesh, self.rules))
        names = self.mesh.axis_names
        known = tuple(dict.fromkeys([*names, *AXES]))
        unknown = [(where, axis) for where, axis in self.rules.axes() if axis not in known]
        problems = [messages.unknown_axis(where, axis, known, names) for where, axis in unknown]
        kinds = dict(zip(names, self.mesh.axis_types, strict=True))
        if len(set(kinds.values())) > 1 or AxisType.Manual in kinds.values():
            problems.append(messages.mixed_axis_types({axis: kind.name for axis, kind in kinds.items()}))
        if problems:
            raise LayoutError(problems)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, devices: Devices = None, where: str = "layout") -> Layout:
        """A layout from ``{"mesh": {...}, "rules": {...}}``; an integer ``devices`` makes the mesh abstract.

        Errors begin with ``where``.
        """
        parts = build(_Data, data, where)
        try:
            spec = MeshSpec.from_dict(parts.mesh or {})
            mesh = spec.abstract(devices) if isinstance(devices, int) else spec.build(devices)
            return cls(mesh, Rules.from_dict(parts.rules or {}))
        except JaxparError as error:
            raise type(error)(f"{where}: {error}") from error

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], *, devices: Devices = None) -> Layout:
        """A layout from a YAML file with the keys ``mesh`` and ``rules``; see :meth:`from_dict`."""
        return cls.from_dict(load_yaml(path), devices=devices, where=os.fspath(path))

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis → size."""
        return dict(self.mesh.shape)

    def resolve(
        self,
        dims: Sequence[str | None],
        shape: Sequence[int] | None = None,
        *,
        role: str = "activations",
        dtype: Any = np.float32,
        path: str = "tensor",
    ) -> Resolved:
        """Where a tensor lies and why, with its problems as texts; raises nothing. See :func:`jaxpar.sharding.resolve.resolve`."""
        return resolve(self.rules, self.sizes, tuple(dims), shape, role=role, itemsize=_itemsize(dtype), path=path)

    def spec(self, dims: Sequence[str | None], shape: Sequence[int] | None = None, **options: Any) -> PartitionSpec:
        """The ``PartitionSpec`` of a tensor with these logical dims. Options are those of :meth:`resolve`.

        Raises:
          LayoutError: unknown dim, rank ≠ names, indivisible dim, or an axis claimed twice; all are listed.
        """
        resolved = self.resolve(dims, shape, **options)
        if resolved.problems:
            raise LayoutError(resolved.problems)
        return to_spec(resolved)

    def sharding(self, dims: Sequence[str | None], shape: Sequence[int] | None = None, **options: Any) -> NamedSharding:
        """The ``NamedSharding`` of a tensor with these logical dims; raises as :meth:`spec` does."""
        return NamedSharding(self.mesh, self.spec(dims, shape, **options))

    def on_one_device(self) -> Layout:
        """The same rules on a mesh of the same axes, all of size 1, over the first device: the reference for a layout."""
        names, kinds = self.mesh.axis_names, self.mesh.axis_types
        devices = np.asarray(jax.devices()[:1]).reshape((1,) * len(names))
        return Layout(Mesh(devices, names, axis_types=kinds), self.rules)

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
    """The ``PartitionSpec`` of a resolved tensor (which writes no axes as ``None`` and a single one by its name)."""
    return PartitionSpec(*resolved.axes)


def current_layout() -> Layout:
    """The ambient layout.

    Raises:
      NoLayoutError: there is none.
    """
    layout: Layout | None = ambient_layout.value
    if layout is None:
        raise NoLayoutError(messages.NO_LAYOUT)
    return layout


@contextmanager
def tracing_under(layout: Layout) -> Iterator[None]:
    """Make ``layout`` ambient inside a function that jit is already tracing, where ``jax.set_mesh`` may not be called.

    Raises:
      LayoutError: another layout is ambient.
    """
    outer = ambient_layout.value
    if outer is not None and outer != layout:
        other_rules = layout.rules != outer.rules
        raise LayoutError(messages.other_layout(layout.sizes, outer.sizes, other_rules=other_rules))
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh), ambient_layout(layout):
        yield


def observing(callback: Callable[[str, Sequence[str | None], Any, Resolved], None]) -> AbstractContextManager[None]:
    """While active, ``callback(call_site, dims, x, resolved)`` replaces raising problems in ``constrain`` and ``hint``."""
    return hint_observer(callback)


def constrain[T](x: T, *dims: str | None) -> T:
    """``x`` laid out by the ambient layout's activation rules for its logical dims. Strict.

    Raises:
      NoLayoutError: outside ``with layout:``.
      LayoutError: unknown dim, rank ≠ names, indivisible dim, axis claimed twice, or an axis that an enclosing
        ``shard_map`` has made manual.
    """
    return _apply(x, dims, lenient=False)


def hint[T](x: T, *dims: str | None, role: str = "activations") -> T:
    """As :func:`constrain`, but leaves out axes that an enclosing ``shard_map`` has made manual: lenient only there.

    ``role`` is that of the rules; see :class:`jaxpar.Rules`.
    """
    return _apply(x, dims, lenient=True, role=role)


def _apply(x: Any, dims: Sequence[str | None], *, lenient: bool, role: str = "activations") -> Any:
    layout = current_layout()
    context = jax.sharding.get_abstract_mesh()
    manual = context.manual_axes
    site = call_site()
    path = f"{'hint' if lenient else 'constrain'}() in {site}"
    sizes = {axis: size for axis, size in layout.sizes.items() if axis not in manual}
    resolved = resolve(layout.rules, sizes, dims, x.shape, role=role, itemsize=_itemsize(x.dtype), path=path)
    if manual and not lenient:
        # Inside a shard_map the sizes of x are those of one shard, so what the rules would do is asked without them.
        where = messages.tensor(path, dims, x.shape)
        refused = [(dim, axis) for dim in layout.resolve(dims).dims for axis in dim.axes if axis in manual]
        found = [f"{where}: {messages.manual_axis(dim.name, axis, dim.rule)}" for dim, axis in refused]
        resolved = replace(resolved, problems=(*resolved.problems, *found))
    if hint_observer.value is not None:
        hint_observer.value(site, dims, x, resolved)
    elif resolved.problems:
        raise LayoutError(resolved.problems)
    if resolved.problems:
        return x
    # Only the context knows which axes are manual; only the layout's own mesh holds devices, which an eager call needs.
    return lay_out(context if manual else layout.mesh, x, to_spec(resolved))


def lay_out(mesh: Mesh | AbstractMesh, x: Any, spec: PartitionSpec) -> Any:
    """``x`` laid out by a spec, in the way that the mesh's axes want it."""
    sharding = NamedSharding(mesh, spec)
    # Under Explicit axes with_sharding_constraint only asserts; under Auto axes reshard raises.
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else jax.lax.with_sharding_constraint(x, sharding)


def manual_axes(layout: Layout, axes: Iterable[str], *, but: Container[str] = ()) -> set[str]:
    """The ``axis_names`` of a ``shard_map`` over ``axes``: these and all axes of size 1, except ``but``.

    An axis of size 1 that stays automatic would leave its name in the compiled program's shardings.
    """
    return {*axes, *(axis for axis, size in layout.sizes.items() if size == 1 and axis not in but)}


def call_site() -> str:
    """``Attention.__call__ (layers.py:178)``: the model code that called ``constrain`` or ``hint``."""
    frame = sys._getframe()
    while frame.f_back is not None and _LIBRARIES.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _itemsize(dtype: Any) -> int:
    size = getattr(dtype, "itemsize", None)  # of a PRNG key's dtype an integer, of the class np.float32 a descriptor
    return size if isinstance(size, int) else np.dtype(dtype).itemsize
