"""Which weights are gathered exactly, in the dtype of the compute, where others are gathered in int8 or fewer bits.

A rounded router chooses other experts. So the loss is traced, and the weights whose products are logits of a
:class:`jaxpar.moe.Router` are found, whatever the model and its names are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.errors import ConfigError, did_you_mean, listing
from jaxpar.parallel.collectives.gather_reduce import scores_experts
from jaxpar.parallel.experts.bias import balanced_biases
from jaxpar.parallel.experts.routing import LOGITS
from jaxpar.parallel.precision.fp8_matmul import PRODUCT
from jaxpar.parallel.precision.policy import STORED as IN_OWN_DTYPE
from jaxpar.parallel.precision.policy import Exact, Precision
from jaxpar.parallel.zero.gather import EXACT
from jaxpar.training.model import Path, leaves_with_paths, map_with_paths
from jaxpar.training.state import TrainState
from jaxpar.utils.jaxprs import follow, follow_loop, inner_jaxprs, opened, scan_counts


class ExactWeights(NamedTuple):
    """Weights that are gathered in the dtype of the compute, though others are gathered in fewer bits.

    Attributes:
      reasons: why, by the weights' paths in the parameters.
      rounded_routers: the paths of weights that choose experts and are gathered in fewer bits all the same.
    """

    reasons: Mapping[Path, str]
    rounded_routers: tuple[Path, ...]


STORED, MULTIPLIED, ROUNDED = "stored", "multiplied", "rounded"
"""What an array is of a weight: computed from weights alone; a product with it; or one that ``sharded_dot`` rounds."""
Labels = frozenset[tuple[int, str]]
"""The weights, by index, that an array is made of; or :data:`_DATA`."""
_DATA = (-1, "data")
"""The label of arrays that depend on more than weights."""
_NONE: Labels = frozenset()

SAME_NUMBERS = frozenset((
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice",
    "concatenate", "pad", "rev", "copy", "copy_p", "sharding_constraint", "reduce_precision", "device_put",
    "all_gather", "all_gather_invariant", "split", "psum", "psum_invariant", "reduce_scatter", "psum_scatter",
))  # fmt: skip
_PRODUCTS = frozenset(("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"))
_ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "max", "min", "neg", "tanh", "logistic", "exp", "log", "select_n", "pow",
    "integer_pow", "sqrt", "rsqrt", "clamp",
))  # fmt: skip


def exact_weights(
    run: Callable[..., Any], state: TrainState, precision: Precision, *others: Any, all_rounded: bool = True
) -> ExactWeights:
    """Returns the weights that are gathered exactly; none if the precision does not gather in fewer bits.

    Args:
      run: the loss as a function of the parameters and of ``others``; see :func:`jaxpar.training.loss.loss_of`.
      state: the parameters, as arrays or shapes, and the names of their dims.
      precision: the precision of the step.
      *others: more arguments of ``run``, as arrays or shapes.
      all_rounded: whether all other weights are gathered in fewer bits; else only those of ``sharded_dot`` are.

    Raises:
      ConfigError: ``precision.exact`` names a dim that no parameter has.
    """
    if not precision.rounds_weights:
        return ExactWeights({}, ())
    dims = {path[1:]: names for path, names in state.metadata.dims if path[0] == "params"}
    check_dims(precision, dims)
    routers = router_weights(run, state.params, *others)
    reasons: dict[Path, str] = {}
    for path, _ in leaves_with_paths(state.params):
        names = dims.get(path, ())
        named = [name for name in names if name in precision.exact]
        if named:
            reasons[path] = f"precision.exact names its dim {named[0]!r}"
        elif scores_experts(names) or (path in routers and (all_rounded or not routers[path])):
            reasons[path] = "it chooses experts"
    return ExactWeights(reasons, tuple(path for path in routers if path not in reasons))


def exact_by_path(
    run: Callable[..., Any] | None, state: TrainState, precision: Precision, *others: Any
) -> dict[Path, Exact]:
    """Returns how exactly weights are gathered and their gradients reduced, by path; those not named, as others are.

    Args:
      run, state, precision, others: as for :func:`exact_weights`; without ``run`` no weight is gathered.
    """
    gathered = {} if run is None else exact_weights(run, state, precision, *others).reasons
    return {**dict.fromkeys(gathered, True), **dict.fromkeys(balanced_biases(state.opt_state), IN_OWN_DTYPE)}


def computing(params: Any, state: TrainState, precision: Precision) -> Any:
    """Returns parameters, or some of them, in the dtypes of the compute.

    Args:
      params: a tree with the paths of the state's parameters.
      state: its optimizer says which of them stay in their own dtype.
      precision: of the step.
    """
    stored = balanced_biases(state.opt_state)
    return map_with_paths(lambda path, w: w if path in stored else precision.computing(w), params)


def check_dims(precision: Precision, dims: Mapping[Path, Sequence[str | None]]) -> None:
    """Raises if ``precision.exact`` names a dim that no parameter has.

    Raises:
      ConfigError: it does.
    """
    known = sorted({name for names in dims.values() for name in names if name is not None})
    for name in precision.exact:
        if name not in known:
            raise ConfigError(
                f"precision: exact names the dim {name!r}, which no parameter has.{did_you_mean(name, known)} Remedy: "
                f"name some of {listing(known)}."
            )


def router_weights(run: Callable[..., Any], params: Any, *others: Any) -> dict[Path, bool]:
    """Returns the weights that the logits and biases of routers come from, and whether ``sharded_dot`` rounds them.

    Args:
      run: a function of the parameters and of ``others``.
      params: the parameters, as arrays or shapes.
      *others: its other arguments, as arrays or shapes.

    >>> import jax.numpy as jnp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> run = lambda p, x: Router(experts=4, k=2)(jnp.tanh(x @ p["up"]) @ p["gate"].T + p["bias"]).weights
    >>> router_weights(run, {"up": jnp.ones((8, 8)), "gate": jnp.ones((4, 8)), "bias": jnp.ones(4)}, jnp.ones((3, 8)))
    {('bias',): False, ('gate',): False}
    """
    traced = jax.make_jaxpr(run)(params, *others).jaxpr
    paths = [path for path, _ in leaves_with_paths(params)]
    labels = [frozenset(((i, STORED),)) for i in range(len(paths))]
    search = _Search()
    search.follow(traced, [*labels, *[frozenset((_DATA,))] * (len(traced.invars) - len(labels))])
    return {paths[i]: (i, ROUNDED) in search.found for i in sorted({i for i, _ in search.found})}


class _Search:
    """Follows the weights through a program to the routers, and collects those that arrive."""

    def __init__(self) -> None:
        self.found: set[tuple[int, str]] = set()

    def follow(self, jaxpr: Jaxpr, given: Sequence[Labels]) -> list[Labels]:
        """Returns the labels of the results, if ``given`` are those of the arguments."""
        return follow(jaxpr, given, _NONE, self._results, consts=frozenset((_DATA,)))

    def _results(self, eqn: JaxprEqn, operands: list[Labels]) -> list[Labels]:
        name, count, both = eqn.primitive.name, len(eqn.outvars), _NONE.union(*operands)
        if not both:
            return [_NONE] * count
        if name == "name":
            return [self._named(eqn.params["name"], both)]
        if name == "optimization_barrier":
            return operands
        if name == "dynamic_slice":
            return [operands[0]]
        if name in SAME_NUMBERS:
            return [both] * count
        if inner_jaxprs(eqn):
            return self._inside(eqn, operands)
        if _DATA not in both:
            return [both] * count
        kept = both if name in _ELEMENTWISE else _NONE
        if name in _PRODUCTS:  # a product that is multiplied again is an activation
            kept = _NONE.union(*(labels for labels in operands if _DATA not in labels))
        return [frozenset((i, MULTIPLIED if what == STORED else what) for i, what in (*kept, _DATA))] * count

    def _named(self, name: str, labels: Labels) -> Labels:
        if name == LOGITS:
            self.found |= labels - {_DATA}
        if name in (PRODUCT, EXACT):
            after = ROUNDED if name == PRODUCT else MULTIPLIED
            return frozenset((i, after if what in (MULTIPLIED, ROUNDED) else what) for i, what in labels)
        return labels

    def _inside(self, eqn: JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the labels of the results of a call, a loop or a branch."""
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "cond":
            branches = [self.follow(opened(branch), operands[1:]) for branch in params["branches"]]
            return [_NONE.union(*found) for found in zip(*branches, strict=True)]
        if name == "while":
            run = functools.partial(self.follow, opened(params["body_jaxpr"]))
            return follow_loop(run, operands[params["cond_nconsts"] :], params["body_nconsts"], count)
        if name == "scan":
            run = functools.partial(self.follow, opened(params["jaxpr"]))
            return follow_loop(run, operands, *scan_counts(eqn))
        bodies = [opened(body) for body in inner_jaxprs(eqn)]
        body = next((body for body in bodies if len(body.invars) == len(operands)), None)
        if body is None or len(body.outvars) != count:
            return [frozenset((_DATA,))] * count
        return self.follow(body, operands)
