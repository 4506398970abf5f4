"""``remat_layers``: the repeated layers of any model's loss, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpar.errors import ConfigError
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED
from jaxpar.planning.layers.find import RepeatedLayers, find_layers
from jaxpar.planning.names.annotate import AnnotatedLoss
from jaxpar.training.loss import LossFn, LossProgram
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.remat import OUTPUT, RematPolicy
from jaxpar.utils.jaxprs import equations, opened, with_inlined

_NAMED = {"save_attention": (SAVED, KEPT), "save_outputs": (OUTPUT,)}
"""Policies that keep named tensors, and the names."""


def remat_layers(loss_fn: LossFn, policy: str | RematPolicy) -> LossFn:
    """Returns the loss with its repeated layers recomputed by a policy.

    The layers are found in the trace of the loss: a scan over stacked weights, or modules that differ in a number of
    their paths (``blocks/0``, ``Block_1``) and run one after the other. What the model itself recomputes in its layers
    (``nnx.remat``, ``jax.checkpoint``) is replaced.

    Args:
      loss_fn: as for :func:`jaxpar.train_step`, or that of :func:`jaxpar.annotate`.
      policy: a name or a policy. ``save_names`` keeps what the model names with ``jax.ad_checkpoint.checkpoint_name``;
        ``slice_activation`` is for built-in models.

    Returns:
      The loss, for :func:`jaxpar.train_step`. Called directly, it recomputes nothing.

    Raises:
      ConfigError: there is no such policy, or it has ``slice_activation``.

    Raises (when the step is traced):
      ConfigError: the loss has no repeated layers; ``policy.layers`` selects layers of a scan, or does not fit the
        number of layers; or no tensor has a name of ``save_names``.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"blocks": [jp.tag(0.1 * jnp.eye(8), "embed", "mlp") for _ in range(4)]}
    >>> def loss_fn(model, batch):
    ...     x = batch["x"]
    ...     for w in model["blocks"]:
    ...         x = x + jnp.tanh(x @ w)
    ...     return (x**2).mean()
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed="data", mlp=None))
    >>> state = jp.init(layout, make_model, optax.sgd(0.1))
    >>> step = jp.train_step(layout, jp.models.remat_layers(loss_fn, "full"))
    >>> state, metrics = step(state, {"x": jnp.ones((8, 8))})
    >>> round(float(metrics["loss"]), 4)
    2.1366
    """
    if isinstance(loss_fn, AnnotatedLoss):  # the constraints go into the recomputed layers
        return loss_fn.with_loss(remat_layers(loss_fn.loss_fn, policy))
    return RematLoss(loss_fn, RematPolicy.of(policy))


@dataclass(frozen=True)
class RematLoss:
    """A loss whose layers are recomputed; see :func:`remat_layers`.

    Attributes:
      loss_fn: the loss.
      policy: the policy.
    """

    loss_fn: LossFn
    policy: RematPolicy

    def __post_init__(self) -> None:
        if self.policy.slice_activation:
            raise ConfigError("remat: slice_activation is for built-in models. Remedy: leave it out.")
        object.__setattr__(self, "__wrapped__", self.loss_fn)  # its signature says whether it takes a key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        return self.loss_fn(*args, **kwargs)

    def rewrite(self, run: LossProgram) -> LossProgram:
        """Returns the loss as a function of arrays, with its layers recomputed; a step calls this."""
        inner = getattr(self.loss_fn, "rewrite", None)
        run = run if inner is None else inner(run)
        if jax.config.jax_disable_jit:  # it is used to inspect values, and writes out each step of a scan
            return run
        return recomputed(run, self.policy)


def recomputed(run: LossProgram, policy: RematPolicy) -> LossProgram:
    """Returns a loss, as a function of arrays, with its repeated layers recomputed; raises as :func:`remat_layers`."""
    return lambda *args: TracedLayers.of(run, args).run(args, policy)


def applicable(jaxpr: Any, layers: Sequence[RepeatedLayers]) -> tuple[str, ...]:
    """Returns the recomputation policies that differ for a traced loss, the one that keeps everything first.

    Without layers there are none. A policy that keeps named tensors is one of them if the program names such.
    """
    names = _names(jaxpr)
    named = (policy for policy, kept in _NAMED.items() if set(kept) & set(names))
    return ("none", *named, "dots", "full") if layers else ()


def _names(jaxpr: Any) -> tuple[str, ...]:
    """The names that a program gives to tensors."""
    return tuple(sorted({e.params["name"] for e in equations(opened(jaxpr)) if e.primitive.name == "name"}))


@dataclass(frozen=True)
class TracedLayers:
    """A traced loss and its repeated layers.

    Attributes:
      jaxpr: the trace, closed.
      out_tree: the structure of its results.
      layers: those that were found.
    """

    jaxpr: Any
    out_tree: Any
    layers: tuple[RepeatedLayers, ...]

    @classmethod
    def of(cls, run: LossProgram, args: Sequence[Any]) -> TracedLayers:
        """Trace ``run(params, variables, batch, extra)``; of its arguments only the shapes are used."""
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        traced = with_inlined(traced)
        parts = zip(("params", "variables", "batch", "extra"), args, strict=True)
        paths = [show(path) for name, part in parts for path, _ in leaves_with_paths({name: part})]
        return cls(traced, jax.tree.structure(shapes), find_layers(opened(traced), paths))

    def run(self, args: Sequence[Any], policy: RematPolicy) -> Any:
        """Compute the loss for ``args``, with its layers recomputed by a policy."""
        if not self.layers:
            raise ConfigError(
                f"remat: the loss has no repeated layers that {policy.policy!r} could recompute: no scan over stacked "
                "weights, and no equal modules with numbers in their paths. Remedy: leave remat out, or call "
                "jax.checkpoint in the model."
            )
        jaxpr, rule = opened(self.jaxpr), policy.rule(_names(self.jaxpr))
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(self.jaxpr, "consts", ()), strict=True))
        values |= zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
        get = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
        for part in _parts(jaxpr, self.layers, policy):
            results = part.function(rule)(*(values[var] for var in part.reads))
            values |= zip(part.makes, results, strict=True)
        return jax.tree.unflatten(self.out_tree, [get(atom) for atom in jaxpr.outvars])


@dataclass(frozen=True)
class _Part:
    """Equations of a program that run one after the other.

    Attributes:
      jaxpr: the whole program.
      eqns: the equations.
      reads, makes: the variables that they need, and those of theirs that are needed later.
      layer: what they are: ``""`` for no layer, ``layer``, ``scan``, or ``kept`` for a layer that keeps everything.
    """

    jaxpr: Jaxpr
    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    layer: str = ""

    def function(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the equations as a function of arrays, recomputed by a policy of ``jax.checkpoint``."""
        eqns = [_scan(eqn, rule) for eqn in self.eqns] if self.layer == "scan" else list(self.eqns)
        body = self.jaxpr.replace(eqns=eqns, invars=self.reads, outvars=self.makes, constvars=())
        if self.layer in ("layer", "kept"):
            body = with_inlined(body, remat=True)
        function: Callable[..., Any] = jaxpr_as_fun(_closed(body))
        return jax.checkpoint(function, policy=rule) if self.layer == "layer" else function


def _parts(jaxpr: Jaxpr, layers: Sequence[RepeatedLayers], policy: RematPolicy) -> Iterator[_Part]:
    """The program, cut at its layers."""
    spans: list[tuple[int, int, str]] = []
    for found in layers:
        if found.stacked and policy.layers:
            raise ConfigError(
                f"remat: layers selects some of {found}, which all run the same code. Remedy: leave layers out, or "
                "keep the layers in a list."
            )
        recomputes = [on for a, b, on in policy.segments(found.count) for _ in range(a, b)]
        # Between separate layers, the barriers of jax.checkpoint would make XLA store what it computes again for less.
        kind = "scan" if found.stacked else "kept" if policy.policy == "none" else "layer"
        spans += [(a, b, kind if on else "") for (a, b), on in zip(found.spans, recomputes, strict=False)]
    cuts, at = list[tuple[int, int, str]](), 0
    for start, end, kind in sorted(spans):
        cuts += [(at, start, ""), (start, end, kind)]
        at = end
    later = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    parts: list[_Part] = []
    for start, end, kind in reversed([*cuts, (at, len(jaxpr.eqns), "")]):
        eqns = tuple(jaxpr.eqns[start:end])
        own = {var: None for eqn in eqns for var in eqn.outvars}
        read = {atom: None for eqn in eqns for atom in eqn.invars if isinstance(atom, Var) and atom not in own}
        parts.append(_Part(jaxpr, eqns, tuple(read), tuple(var for var in own if var in later), kind))
        later = (later - own.keys()) | read.keys()
    return reversed(parts)


def _scan(eqn: JaxprEqn, rule: Callable[..., Any]) -> JaxprEqn:
    """A scan with its body recomputed."""
    body = eqn.params["jaxpr"]
    plain = with_inlined(body, remat=True)
    function = jax.checkpoint(jaxpr_as_fun(_closed(plain)), policy=rule, prevent_cse=False)
    return eqn.replace(
        params={**eqn.params, "jaxpr": jax.make_jaxpr(function)(*(var.aval for var in opened(body).invars))}
    )


def _closed(jaxpr: Any) -> ClosedJaxpr:
    # Before jax 0.12 a ClosedJaxpr contains a Jaxpr; since then both are one class.
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) and not isinstance(jaxpr, Jaxpr) else ClosedJaxpr(jaxpr, ())
