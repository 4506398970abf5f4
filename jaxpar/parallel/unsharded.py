"""``unsharded``: a context in which a model runs as plain JAX, where no layout is active."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxpar.sharding.layout import Layout
from jaxpar.sharding.mesh import MeshSpec
from jaxpar.sharding.rules import Rules
from jaxpar.utils.contexts import ambient_layout, hint_observer


@contextmanager
def unsharded() -> Iterator[None]:
    """Runs a model as plain JAX, on request: for a unit test, a notebook, or an export that knows no layout.

    ``hint`` and ``constrain`` return their argument, whatever names it is given. ``gather_weight`` and ``sharded_dot``
    gather nothing, and ``attention`` runs its dense implementation on whole arrays. The results are those of a layout.
    Arrays keep their devices and shardings. Inside ``with layout:``, its rules are suspended.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> with unsharded():
    ...     jp.hint(jnp.ones((2, 3)), "batch", "embed").shape
    (2, 3)
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), ambient_layout(_any_names()), hint_observer(_ignore):
        yield


@functools.cache
def _any_names() -> Layout:
    """A layout of one device that shards nothing; one value, because jit's cache key includes it."""
    return Layout(MeshSpec().abstract(1), Rules())


def _ignore(*_: Any) -> None:
    """Ignores that the layout knows no name."""
