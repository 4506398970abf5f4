"""``GivenShardings``: the shardings from which ``search="sharding_propagation"`` derives all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import PlanError, did_you_mean, listing
from jaxpar.planning.names.given import matches
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.search.plan import BATCH
from jaxpar.training.model import part_of

type Shardings = Mapping[str, str | None | Sequence[str | None]]
"""A logical dim → its mesh axis or ``None``; or a path pattern → an axis or ``None`` for each dim of what it matches.

Paths are those of parameters, and ``batch/...`` for arrays of the batch.
"""

AXES = ("data", "model")
_FORM = "shardings={'mlp': 'model'} or {'**/up/kernel': (None, 'model')}"


@dataclass
class GivenShardings:
    """What is given of the shardings of a program.

    Attributes:
      paths: path of a parameter or of an array of the batch → for each mesh axis the dim that it shards.
      model: the dims that ``model`` shards.
      whole: the dims that it does not shard.
      named: those of ``model`` that were given by name, for all operators.
      axes: the mesh axes that shard something.
      zero: whether a parameter is sharded over ``data``.
    """

    paths: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    model: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    zero: bool = False

    @classmethod
    def of(cls, shardings: Shardings, program: NamedProgram) -> GivenShardings:
        """Returns what is given.

        Args:
          shardings: a logical dim or a path pattern → its axes.
          program: the loss.

        Raises:
          PlanError: an unknown dim, path or axis, another number of axes than dims, a dim without a name, or dims that
            no table of rules shards as it is given.
        """
        found, names = cls(), classes_of(program)
        for key, value in shardings.items():
            axes = (value,) if value is None or isinstance(value, str) else tuple(value)
            used = [axis for axis in axes if axis is not None]
            if set(used) - {*AXES} or len(set(used)) < len(used):
                raise PlanError(
                    f"shardings[{key!r}] must be mesh axes among {listing(AXES)}, each at most once, got {value!r}. "
                    f"Remedy: write {_FORM}."
                )
            found.axes.update(used)
            if value is None or isinstance(value, str):
                found._add_dim(key, value, names)
            else:
                found._add_paths(key, axes, program)
        if both := found.model & found.whole:
            raise PlanError(
                f"shardings shard {listing(sorted(both))} over model in one place and not in another; a table of rules "
                "shards a dim alike in all weights. Remedy: give one of them, or other names= to the dims of one."
            )
        return found

    def _add_dim(self, name: str, axis: str | None, names: Mapping[str, str]) -> None:
        """Add a logical dim with its axis."""
        own = names.get(name)
        if own is None:
            raise PlanError(
                f"shardings[{name!r}] is no dim of the model, which has {listing(sorted(names))}."
                f"{did_you_mean(name, names)} Remedy: write {_FORM}."
            )
        if axis is not None:
            _check_axis(name, own, axis, parameter=False)
        if axis == "model":
            self.model.add(own)
            self.named.add(own)
        elif axis is None:
            self.whole.add(own)

    def _add_paths(self, pattern: str, axes: Sequence[str | None], program: NamedProgram) -> None:
        """Add the arrays that a pattern matches, with the axes of their dims."""
        for path, dims in _matched(pattern, axes, program).items():
            parameter = part_of(path) == "params"
            strategy: dict[str, str | None] = dict.fromkeys(AXES)
            for name, axis in zip(dims, axes, strict=True):
                if axis is not None:
                    strategy[axis] = _check_axis(path, name, axis, parameter=parameter)
                elif parameter and name is not None:
                    self.whole.add(name)
            if (sharded := strategy["model"]) is not None:
                self.model.add(sharded)
            self.zero |= parameter and strategy["data"] is not None
            self.paths.setdefault(path, tuple(strategy.values()))


def rules_given(rules: Mapping[str, Any], program: NamedProgram) -> dict[str, str | None]:
    """Returns the shardings that a table of rules gives: all its dims of the program.

    Args:
      rules: dim → axis, axes or ``None``. Tables of roles are left out.
      program: the loss.
    """
    found: dict[str, str | None] = {}
    for name in rules.keys() & classes_of(program).keys():
        axes = [rules[name]] if isinstance(rules[name], str) else list(rules[name] or ())
        found[name] = next((axis for axis in AXES if axis in axes), None)
    return {name: axis for name, axis in sorted(found.items()) if name != BATCH or axis is not None}


def classes_of(program: NamedProgram) -> dict[str, str]:
    """Returns every name of a dim → the name of its class: models may give several names to dims of one class."""
    found: dict[str, str] = {}
    for path in program.inputs:
        own = program.given.get(path, (None,))[0]
        for i, name in enumerate(_class_names(program, path)):
            if name is not None:
                found.setdefault(name, name)
                if own is not None and own[i] is not None:
                    found.setdefault(own[i] or name, name)
    return found


def _class_names(program: NamedProgram, path: str) -> list[str | None]:
    """The name of the class of each dim of an array: that of its major part."""
    flat = [program.names.classes.flat(dim) for dim in program.inputs[path].dims]
    return [program.names.of(dim[:1]).name if dim else None for dim in flat]


def _matched(pattern: str, axes: Sequence[str | None], program: NamedProgram) -> dict[str, list[str | None]]:
    """The arrays that a pattern matches, with the names of their dims."""
    known = {path.removeprefix("params/"): path for path in program.inputs if part_of(path) in ("params", "batch")}
    found = {path: _class_names(program, path) for short, path in known.items() if matches(pattern, short)}
    if not found:
        raise PlanError(
            f"shardings[{pattern!r}] matches no parameter and no array of the batch.{did_you_mean(pattern, known)} "
            f"Remedy: write a path such as {next(iter(known))!r}, with * for one part and ** for any number."
        )
    for path, names in found.items():
        if len(names) != len(axes):
            raise PlanError(
                f"shardings[{pattern!r}] has {len(axes)} axes, but {path} has {len(names)} dims "
                f"{list(program.inputs[path].shape)}. Remedy: an axis or None for each dim."
            )
    return found


def _check_axis(what: str, name: str | None, axis: str, *, parameter: bool) -> str:
    """Returns the name of a dim that the axis may shard."""
    if name is None:
        raise PlanError(
            f"shardings shard a dim of {what} over {axis} that has no name, so that no rule can shard it. "
            "Remedy: give it a name with names=."
        )
    if (axis == "data" and not parameter and name != BATCH) or (axis == "model" and name == BATCH):
        raise PlanError(
            f"shardings shard {name!r} over {axis}, but data shards the batch, and model the other dims. "
            f"Remedy: {'model' if axis == 'data' else 'data'!r} for it, or search='enumerate'."
        )
    return name
