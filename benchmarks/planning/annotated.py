"""A model without a single name or hint, annotated by ``jp.annotate``, beside the same model annotated by hand.

    uv run python benchmarks/planning/annotated.py [--layouts fsdp,tp_sp,fsdp_tp,ring,ring_6_heads]

The model is the example Llama. By hand, its parameters have names, its activations hints, and its matmuls gather their
weights (``sharded_dot``). For ``annotate`` all of that is taken away: what remains are ``jnp`` matmuls and attention.
Both are compiled for 8 simulated CPU devices. For each layout: bytes on the wire of one device in one step, peak
memory, and the largest difference of a gradient from one device, relative to the largest gradient.

Goals: wire and peak at most 1.05 of those by hand; gradients within 2e-6. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast
from unittest import mock

import jaxpar as jp

jp.simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar.models import LlamaConfig, make_llama, next_token_loss
from jaxpar.utils.contexts import attention_observer

CONFIG = LlamaConfig(vocab=512, embed=128, layers=4, heads=8, kv_heads=4, head_dim=16, mlp=384)
ROWS, SEQ = 16, 128
WIRE = PEAK = 1.05
GRADIENTS = 2e-6
LAYOUTS = dict.fromkeys(("fsdp", "tp_sp", "fsdp_tp", "ring"), CONFIG)
"""Layout of configs/layouts → the model."""
LAYOUTS["ring_6_heads"] = replace(CONFIG, heads=6, kv_heads=3)  # cannot be exchanged among 4 devices, as 8 heads can
MODULES = ("model", "layers")


@contextmanager
def unannotated() -> Iterator[None]:
    """The Llama's modules with plain ``jnp`` in place of hints, gathers and split attention."""

    def plain_dot(x: jax.Array, *weights: Any, dtype: Any = None, summed: int = 1, **_: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.tensordot(x, w.astype(dtype or w.dtype), summed) for w, _ in weights)

    replaced = {
        "hint": lambda x, *_, **__: x,
        "sharded_dot": plain_dot,
        "gather_weight": lambda w, *_, dtype=None: w if dtype is None else w.astype(dtype),
    }
    patches = []
    for module in MODULES:
        path = f"jaxpar.models.llama.{module}"
        patches += [mock.patch(f"{path}.{name}", new) for name, new in replaced.items() if hasattr(_module(path), name)]
    as_they_are: Any = lambda self, *arrays, order_BS=None: (None, None, arrays)
    patches.append(mock.patch("jaxpar.models.llama.model.Llama.reorder_tokens", as_they_are))
    with mock.patch("jaxpar.models.llama.layers.Attention.__call__", _attention):
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def _module(path: str) -> Any:
    return sys.modules[path]


def _attention(self: Any, x: jax.Array, tokens: Any, attend: Any = None, *, half: bool = False) -> jax.Array:
    """Grouped-query attention as a user would write it."""
    from jaxpar.models.llama.layers import rotate

    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[...].astype(x.dtype)) for w in (self.q, self.k, self.v))
    q, k = rotate(q, tokens.rope), rotate(k, tokens.rope)
    k, v = (jnp.repeat(y, q.shape[2] // k.shape[2], 2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    return jnp.einsum("bshd,hde->bse", jnp.einsum("bhqk,bkhd->bqhd", weights, v), self.o[...].astype(x.dtype))


def without_names(make_model: Callable[[jax.Array], nnx.Module], key: jax.Array) -> nnx.Module:
    """Returns the Llama without the names of its parameters."""
    model = make_model(key)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and "logical_dims" in variable.get_metadata():
            variable.set_metadata("logical_dims", None)
    return model


@dataclass(frozen=True)
class Measured:
    """A step: its bytes on the wire, its peak memory, its gradients, and how its attention runs."""

    wire: float
    peak: int
    grads: Any
    attention: frozenset[str]

    @classmethod
    def of(cls, layout: jp.Layout, make_model: Any, loss_fn: Any, batch: Any) -> Self:
        tx, impls = optax.sgd(0.1), set[str]()
        state = jp.init(layout, make_model, tx)
        step = jp.train_step(layout, loss_fn, return_grads=True)
        with attention_observer(lambda site, q, k, choice: impls.add(choice.impl)):
            compiled = step.lower(state, batch).compile()
        figures, memory = jp.audit(compiled, mesh=layout.mesh), cast(Any, compiled.memory_analysis())
        _, metrics = step(state, batch)
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        return cls(figures.wire_bytes(), peak, metrics["grads"], frozenset(impls))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    names = parser.parse_args().layouts.split(",")
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, CONFIG.vocab, (ROWS, SEQ), dtype=np.int32) for name in ("tokens", "targets")}
    print("layout        wire by hand  annotated  ratio  peak by hand  annotated  ratio  grads    attention")
    missed = 0
    for name in names:
        make_model = make_llama(LAYOUTS[name])
        with unannotated():
            found = jp.annotate(partial(without_names, make_model), next_token_loss, batch)
        layout = jp.Layout.from_yaml(f"configs/layouts/{name.partition('_6')[0]}.yaml")
        own = layout.rules.replace(**{dim: None for dim in found.names if dim not in layout.rules.table})
        hand = Measured.of(layout, make_model, next_token_loss, batch)
        with unannotated():
            auto = Measured.of(jp.Layout(layout.mesh, own), found.make_model, found.loss_fn, batch)
            one = Measured.of(layout.on_one_device(), make_model, next_token_loss, batch)
        pairs = list(zip(jax.tree.leaves(one.grads), jax.tree.leaves(auto.grads), strict=True))
        largest = max(float(jnp.abs(a).max()) for a, _ in pairs)
        error = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / largest
        wire, peak = auto.wire / hand.wire, auto.peak / hand.peak
        missed += wire > WIRE or peak > PEAK or error > GRADIENTS
        mib = [x / 2**20 for x in (hand.wire, auto.wire, hand.peak, auto.peak)]
        print(
            f"{name:12}  {mib[0]:8.2f} MiB  {mib[1]:5.2f} MiB  {wire:5.2f}  {mib[2]:8.2f} MiB  {mib[3]:5.2f} MiB"
            f"  {peak:5.2f}  {error:.1e}  {', '.join(auto.attention) or 'as written'}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
