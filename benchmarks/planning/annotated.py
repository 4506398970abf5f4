"""A model without a single name or hint, annotated by ``jp.annotate``, beside the same model annotated by hand.

    uv run python benchmarks/planning/annotated.py [--layouts fsdp,tp_sp,fsdp_tp]

The model is the example Llama. By hand, its parameters have names, its activations hints, and its matmuls gather their
weights (``sharded_dot``). For ``annotate`` all of that is taken away: what remains are ``jnp`` matmuls and attention.
Both are compiled for 8 simulated CPU devices. For each layout: bytes on the wire of one device in one step, peak
memory, and the largest difference of a gradient from one device, relative to the largest gradient.

Goals: wire and peak at most 1.05 of those by hand; gradients within 2e-6. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import jaxpar as jp

jp.simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar.models import LlamaConfig, make_llama, next_token_loss
from jaxpar.training.state import TrainState

CONFIG = LlamaConfig(vocab=512, embed=128, layers=4, heads=8, kv_heads=4, head_dim=16, mlp=384)
ROWS, SEQ = 16, 128
WIRE = PEAK = 1.05
GRADIENTS = 2e-6
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


def without_names(key: jax.Array) -> nnx.Module:
    """Returns the Llama without the names of its parameters."""
    model = make_llama(CONFIG)(key)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and "logical_dims" in variable.get_metadata():
            variable.set_metadata("logical_dims", None)
    return model


def step_of(layout: jp.Layout, make_model: Any, loss_fn: Any, batch: Any) -> tuple[float, int, TrainState, Any]:
    """Returns wire bytes, peak bytes, the state after a step and the gradients."""
    tx = optax.sgd(0.1)
    state = jp.init(layout, make_model, tx)
    step = jp.train_step(layout, loss_fn, return_grads=True)
    compiled = step.lower(state, batch).compile()
    figures, memory = jp.audit(compiled, mesh=layout.mesh), cast(Any, compiled.memory_analysis())
    after, metrics = step(state, batch)
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    return figures.wire_bytes(), peak, after, metrics["grads"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", default="fsdp,tp_sp,fsdp_tp,ring")
    names = parser.parse_args().layouts.split(",")
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, CONFIG.vocab, (ROWS, SEQ), dtype=np.int32) for name in ("tokens", "targets")}
    with unannotated():
        found = jp.annotate(without_names, next_token_loss, batch)
    print("layout    wire by hand  annotated  ratio  peak by hand  annotated  ratio  grads")
    missed = 0
    for name in names:
        layout = jp.Layout.from_yaml(f"configs/layouts/{name}.yaml")
        own = layout.rules.replace(**{dim: None for dim in found.names if dim not in layout.rules.table})
        hand = step_of(layout, make_llama(CONFIG), next_token_loss, batch)
        with unannotated():
            auto = step_of(jp.Layout(layout.mesh, own), found.make_model, found.loss_fn, batch)
            one = step_of(layout.on_one_device(), make_llama(CONFIG), next_token_loss, batch)
        pairs = list(zip(jax.tree.leaves(one[3]), jax.tree.leaves(auto[3]), strict=True))
        largest = max(float(jnp.abs(a).max()) for a, _ in pairs)
        error = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / largest
        wire, peak = auto[0] / hand[0], auto[1] / hand[1]
        missed += wire > WIRE or peak > PEAK or error > GRADIENTS
        print(
            f"{name:8}  {hand[0] / 2**20:8.2f} MiB  {auto[0] / 2**20:5.2f} MiB  {wire:5.2f}  {hand[1] / 2**20:8.2f} MiB"
            f"  {auto[1] / 2**20:5.2f} MiB  {peak:5.2f}  {error:.1e}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
