"""``Annotation``: a model and its loss with named dims, as a table that says why each name was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.analysis.units import aligned
from jaxpar.errors import AnnotationError, RulesError, listing, unknown
from jaxpar.planning.names.attention_sites import AttentionSite
from jaxpar.planning.names.constrain import RESIDUAL_SEQ
from jaxpar.planning.names.fold import folded
from jaxpar.planning.names.roles import DimName
from jaxpar.sharding.names import Names
from jaxpar.sharding.rules import Rules
from jaxpar.training.batch import shapes_of_batch, tag_batch
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel, leaves_with_paths, part_of, show


@dataclass(frozen=True)
class NamedArray:
    """A parameter, a carried array or an array of the batch, with the names of its dims.

    Attributes:
      path: its path, which begins with ``params``, ``variables`` or ``batch``.
      shape: its sizes.
      dims: the name of each dim, and why.
      twice: the names that two of its dims would have; only the first of them has it.
    """

    path: str
    shape: tuple[int, ...]
    dims: tuple[DimName, ...]
    twice: tuple[str, ...] = ()

    @property
    def names(self) -> Names:
        """The name of each dim, or ``None``."""
        return tuple(dim.name for dim in self.dims)


@dataclass(frozen=True)
class Annotation:
    """A model and its loss with named dims; made by :func:`annotate`.

    Attributes:
      make_model: builds the model with its names, for :func:`jaxpar.init` and :func:`jaxpar.explain`.
      loss_fn: computes the same loss, with constraints on the weights and results of matmuls, for
        :func:`jaxpar.train_step`.
      arrays: the model's and the batch's arrays with their names.
      unknown: how often each primitive occurs through which dims could not be followed.
      notes: what a reader should know, such as classes with several given names.
      attention: the attention of the loss, as written in matmuls: what is recognised, and what is not and why.
      matched: path pattern that the user gave → the parameters that it names. Of patterns that match the same one, the
        first names it.
      hinted: the names that hints of the model use.
    """

    make_model: MakeModel
    loss_fn: LossFn
    arrays: tuple[NamedArray, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    attention: tuple[AttentionSite, ...] = ()
    matched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hinted: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, for the table of rules; :meth:`rules` makes it."""
        names = {name for array in self.arrays for name in array.names if name is not None}
        return tuple(sorted(names | self.hinted))

    def rules(self, **rules: Any) -> Rules:
        """Returns rules with ``None`` for each name that has none here.

        Args:
          rules: as for :class:`jaxpar.Rules`.

        Raises:
          RulesError: a rule for a name that nothing has, or as :class:`jaxpar.Rules` raises.

        >>> import jax, jax.numpy as jnp
        >>> import jaxpar as jp
        >>> loss_fn = lambda p, batch: (batch["x"] @ p["w"]).mean()
        >>> x = jax.ShapeDtypeStruct((16, 8), "float32")
        >>> annotation = jp.annotate(lambda key: {"w": jnp.ones((8, 4))}, loss_fn, {"x": x})
        >>> annotation.rules(batch="data").table["batch"]
        ('data',)
        """
        table = Rules(**dict.fromkeys(self.names) | rules)
        known = [*self.names, RESIDUAL_SEQ]
        for name in table.table:
            if name not in known:
                raise RulesError(f"rules: {unknown('logical dim', name, known)}")
        return table

    @property
    def batch_dims(self) -> dict[str, Names]:
        """The names of the batch's arrays, by path below the batch, for :func:`jaxpar.shard_array` and ``verify``."""
        return {a.path.partition("/")[2]: a.names for a in self.arrays if part_of(a.path) == "batch"}

    def tagged(self, batch: Any) -> Any:
        """Returns the shapes of a batch with their dims' names, as :func:`jaxpar.analysis.compile_for` takes them.

        Args:
          batch: a pytree of arrays or shapes, tagged or not, of the structure that was annotated.

        Raises:
          AnnotationError: the batch has an array that the annotated one has not.
        """
        shapes, known = shapes_of_batch(batch), self.batch_dims
        for path, x in leaves_with_paths(shapes):
            if show(path) not in known:
                raise AnnotationError(
                    f"tagged: the batch has an array {show(path)!r} {list(x.shape)}, which was not annotated. "
                    f"Annotated: {listing(known)}. Remedy: jp.annotate(make_model, loss_fn, batch) with a batch that "
                    "has it."
                )
        return tag_batch(shapes, known)

    def __str__(self) -> str:
        reasons: dict[str, tuple[set[int], str]] = {}
        for array in self.arrays:
            for size, dim in zip(array.shape, array.dims, strict=True):
                if dim.name is not None:
                    reasons.setdefault(dim.name, (set(), dim.reason))[0].add(size)
        lines = aligned([("name", "sizes", "why"), *((n, _sizes(s), why) for n, (s, why) in sorted(reasons.items()))])
        rows = ((a.path, " × ".join(map(str, a.shape)), ", ".join(n or "·" for n in a.names)) for a in self.arrays)
        lines += ["", *aligned([("array", "shape", "dims"), *folded(rows)])]
        lines += ["", *aligned(self._pattern_rows())] if self.matched else []
        lines += ["", *aligned(self._attention_rows())] if self.attention else []
        lines += ["", *(f"note: {note}" for note in self._remarks())] if any(self._remarks()) else []
        return "\n".join(lines)

    def _pattern_rows(self) -> list[tuple[str, ...]]:
        """What each pattern of the user names."""
        rows: list[tuple[str, ...]] = [("parameters named by a pattern", "pattern")]
        for pattern, paths in self.matched.items():
            rows += folded((path, pattern) for path in paths) or [("none: patterns before it name them", pattern)]
        return rows

    def _attention_rows(self) -> list[tuple[str, str, str]]:
        """What runs as :func:`jaxpar.attention` where its sequence is sharded, and what does not."""
        counts = Counter[tuple[str, str]]()
        for site in self.attention:
            counts[
                site.text, f"left as it is: {site.reason}" if site.reason else "ring attention, or as auto selects"
            ] += site.count
        rows = [(text, str(count), how) for (text, how), count in counts.items()]
        return [("attention", "times", "if the sequence is sharded"), *rows]

    def _remarks(self) -> list[str]:
        remarks = list(self.notes)
        remarks += [
            f"{array.path} has {listing(array.twice)} in two dims: a mesh axis can shard only the first"
            for array in self.arrays
            if array.twice
        ]
        if self.unknown:
            shown = listing(f"{name} ({count})" for name, count in sorted(self.unknown.items()))
            remarks.append(f"dims are not followed through {shown}: what only they connect has names of its own")
        return remarks


def _sizes(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))
