"""``Generator``: a jitted prefill, a jitted decode step, and the loops that stream their tokens.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.analysis.layout.report import Report
from jaxpar.errors import ConfigError, DivergedError, ModelError
from jaxpar.inference import placement
from jaxpar.inference.cached_model import CACHE_SEQ, DecoderFns
from jaxpar.inference.pipeline import PipelinedDecoder, last_of, stages_of
from jaxpar.inference.request import Request, check_requests, check_top_k
from jaxpar.inference.sampling import BROKEN, NONE, PENDING, Sampling, next_tokens
from jaxpar.parallel.partitioner.repair import avoid_faults
from jaxpar.parallel.precision.quantized_array import is_quantized
from jaxpar.sharding.layout import Layout, hint, tracing_under
from jaxpar.training.model import MakeModel, Tagged, leaves_with_paths, show
from jaxpar.training.quantize import quantize
from jaxpar.training.state import abstract_state
from jaxpar.utils.contexts import ambient_layout
from jaxpar.utils.multihost import check_same, settled

_MIN_PADDED = 16
"""Prompts are padded to a power of two, at least this one, so that few prompt lengths are compiled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """State of a decode step. The step donates it.

    Attributes:
      cache: the cache, as the model defines it (:class:`jaxpar.inference.DecoderFns`).
      tokens: the last token of each row [batch] int32, not yet in the cache.
      at: the position of that token [batch] int32.
      left: how many more tokens each row may generate [batch] int32; 0 where the row has ended.
      keys: a PRNG key per row [batch].
      moving: activations between pipeline stages, and the number of ticks since the prefill; ``None`` without a
        pipeline.
    """

    cache: Any
    tokens: Any
    at: Any
    left: Any
    keys: Any
    moving: Any = None


class Generator:
    """Generates tokens with a model on a layout: ``prefill``, ``decode``, and the loops over them.

    Both are jitted functions, with ``.lower()``:

    - ``prefill(params, prompts) -> (state, tokens)``, where :meth:`prompts` makes the prompts;
    - ``decode(params, state) -> (state, tokens)``, which donates the state. Tokens are [batch] int32, -1 for rows that
      have ended.

    With a pipeline (:mod:`jaxpar.inference.pipeline`), the tokens of the first group are one step ahead of those of the
    other groups, which are -3 in the first step.

    Prompts are padded at the end to one length. Each row counts its own positions and has its own slots, so its tokens
    do not depend on the other rows. The rules shard the cache by ``batch``, ``kv_heads`` and ``head_dim``, and its
    slots by ``cache_seq``, or by ``seq`` if the rules have no ``cache_seq``.

    With a mesh over several processes, each process builds the same generator, restores its own bytes of ``params``,
    and calls :meth:`prepare`, :meth:`stream` or :meth:`generate` with the same arguments in the same order. Each
    process gets all tokens. ``stream`` and ``generate`` first compare the arguments, and raise an error of one process
    on all of them. To end a stream early, all processes must
    leave it after the same step.

    Args:
      layout: the layout of parameters, cache and activations; it may differ from that of the training.
      make_model: as for :func:`jaxpar.init`.
      cached: the model's forward passes with a cache, such as ``cached_llama(config)``.
      batch: rows that one step generates.
      slots: cache slots per row: at least the longest prompt plus the tokens generated from it.
      sampling: how tokens are chosen; greedily if not given.
      stop: tokens that end a request.

    Attributes:
      params: the parameters as shapes with shardings: the target of a restore.
      prepared: the parameters after :meth:`prepare` as shapes with shardings: what to lower ``prefill`` and ``decode``
        for.
      abstract: the decode state as shapes with shardings.

    Raises:
      LayoutError: the mesh does not divide the parameters or the cache.
      ModelError: the model has variables other than its parameters.
      ConfigError: ``batch`` or ``slots`` is below 1, ``stop`` holds a token outside the vocabulary, or pipeline stages
        do not divide ``batch``.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> from jaxpar.models.llama.decode import cached_llama
    >>> from jaxpar.models.llama import make_llama, preset
    >>> layout = jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=jax.devices()[:1])
    >>> config = preset("tiny", layers=1)
    >>> params = jp.init(layout, make_llama(config), optax.identity()).params
    >>> model = Generator(layout, make_llama(config), cached_llama(config), batch=2, slots=32)
    >>> [len(made) for made in model.generate(params, [[1, 2, 3], [4]], most=[2, 3])]
    [2, 3]
    """

    def __init__(
        self,
        layout: Layout,
        make_model: MakeModel,
        cached: DecoderFns,
        *,
        batch: int,
        slots: int,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ):
        for name, value in (("batch", batch), ("slots", slots)):
            if value < 1:
                raise ConfigError(f"Generator: {name} must be at least 1, got {value}.")
        for token in stop:
            if not 0 <= token < cached.vocab:
                raise ConfigError(f"Generator: stop token {token} is not in the model's vocabulary of {cached.vocab}.")
        self.layout, self.cached, self.batch, self.slots = layout, cached, batch, slots
        self.sampling, self.stop = sampling or Sampling(), tuple(stop)
        check_top_k(self.sampling.top_k, cached.vocab)
        state = abstract_state(layout, make_model, optax.identity())
        carried = [show(("variables", *path)) for path, _ in leaves_with_paths(state.variables)]
        if carried:
            more = f" and {len(carried) - 4} more" if len(carried) > 4 else ""
            raise ModelError(
                f"Generator: the model has variables other than its parameters ({', '.join(carried[:4])}{more}), "
                "and generation does not support them. Remedy: use a make_model without counters and statistics, "
                "such as nnx.Dropout without rngs; the checkpoint's parameters still fit it."
            )
        self._state, self.params = state, state.params
        self._long = with_cache(layout)
        self._short = replace(self._long, rules=self._long.rules.replace(**dict.fromkeys(cached.sequence)))
        self._pipeline = PipelinedDecoder.of(cached, stages_of(layout, cached), batch)
        self.prepared, weights = placement.prepared(layout, state, self._prepare)
        cache, kept = placement.placed_cache(self._short, self._cache())
        self._tensors = [*weights, *kept]
        self.abstract = self._abstract(cache)
        devices = layout.mesh.devices.flat if isinstance(layout.mesh, jax.sharding.Mesh) else ()
        self._multiprocess = len({device.process_index for device in devices}) > 1
        # With several processes tokens are replicated, so that each process can read all of them.
        replicated = NamedSharding(layout.mesh, PartitionSpec()) if self._multiprocess else None
        self.prefill = jax.jit(self._partitioned(self._prefill), out_shardings=(None, replicated))
        self.decode = jax.jit(self._partitioned(self._decode), donate_argnums=1, out_shardings=(None, replicated))

    def prepare(self, params: Any) -> Any:
        """Returns the parameters in the form that each step reads fastest: in the compute dtype, or as integers.

        Args:
          params: parameters of the model, as :func:`jaxpar.init` or :func:`jaxpar.restore` returned them, or as
            :func:`jaxpar.compression.quantize` made them from those. They are not changed.
        """
        place = jax.tree.map(lambda x: x.sharding, self.prepared)
        return jax.jit(self.cached.prepare, out_shardings=place)(self._quantized(params))

    def _quantized(self, params: Any) -> Any:
        """Returns parameters as integers where the model keeps integers, unless they are already."""
        config = self.cached.quantize
        done = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
        return params if config is None or done else quantize(params, config)

    def _prepare(self, params: Any) -> Any:
        return self.cached.prepare(self._quantized(params))

    def explain(self) -> Report:
        """Returns a report, as of :func:`jaxpar.explain`, on each prepared parameter and each cache array."""
        return placement.report(self.layout, self._tensors)

    def prompts(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Returns requests as the arrays that ``prefill`` takes.

        Args:
          requests: at most ``batch`` requests; the remaining rows count as ended.

        Returns:
          ``tokens`` [batch, seq] and ``lengths`` and ``left`` [batch], all int32, and ``keys`` [batch].
        """
        rows = [*requests, *(Request((0,), 0),) * (self.batch - len(requests))]
        longest = max(len(row.tokens) for row in rows)
        tokens = np.zeros((self.batch, self._padded(longest)), np.int32)
        for row, request in enumerate(rows):
            tokens[row, : len(request.tokens)] = request.tokens
        return {
            "tokens": tokens,
            "lengths": np.array([len(row.tokens) for row in rows], np.int32),
            "left": np.array([row.most for row in rows], np.int32),
            "keys": jax.vmap(jax.random.key)(np.array([row.seed for row in rows], np.uint32)),
        }

    def stream(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        most: int | Sequence[int],
        seeds: Sequence[int] | None = None,
        first: int = 0,
    ) -> Iterator[list[int]]:
        """Returns an iterator over the tokens of each step: one per request, -1 where a request has ended.

        Args:
          params: parameters of the model; those of :meth:`prepare` are fastest.
          prompts: at most ``batch`` prompts, each with at least one token.
          most: maximum number of tokens to generate, for all requests or for each.
          seeds: seed of each request's PRNG key, 0 to 2**32 - 1; 0, 1, ... if not given.
          first: number of the first request in error messages about logits.

        Raises:
          ConfigError: a prompt is empty, does not fit the cache with the tokens it requests, or has tokens outside the
            vocabulary; there are too many requests; the parameters are not prepared although the model keeps
            integers; or the arguments differ between processes.
          LayoutError: another layout is ambient.
          DivergedError: the logits are not finite; the iterator raises it.
        """
        requests = self._checked_requests(params, prompts, most, seeds, single_batch=True)
        return self._stream(params, requests, first)

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        most: int | Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Returns the tokens that each request generates, without its prompt and without the stop token.

        Runs ``batch`` requests at a time. Arguments and errors are those of :meth:`stream`, but the number of prompts
        is not limited.
        """
        requests = self._checked_requests(params, prompts, most, seeds)
        made: list[list[int]] = [[] for _ in requests]
        for first in range(0, len(requests), self.batch):
            for tokens in self._stream(params, requests[first : first + self.batch], first):
                for row, token in enumerate(tokens, first):
                    if token != NONE and token not in self.stop:
                        made[row].append(token)
        return made

    def _checked_requests(
        self, params: Any, prompts: Any, most: Any, seeds: Any, *, single_batch: bool = False
    ) -> list[Request]:
        """Check the requests; with several processes, on all of them together."""

        def checked() -> list[Request]:
            self._check_prepared(params)
            requests = check_requests(prompts, most, seeds, slots=self.slots, vocab=self.cached.vocab)
            if single_batch and len(requests) > self.batch:
                raise ConfigError(
                    f"Generator: stream() got {len(requests)} requests, but batch is {self.batch}. Remedy: "
                    "call generate(), which runs a batch at a time, or increase batch."
                )
            return requests

        if not self._multiprocess:
            return checked()
        jax.block_until_ready(params)  # collectives of two concurrent programs could be matched with each other
        requests = settled(checked)
        facts = {"batch": self.batch, "slots": self.slots, "stop": list(self.stop), "sampling": repr(self.sampling)}
        facts |= {f"request {number}": request.summary() for number, request in enumerate(requests)}
        check_same("Generator", facts, "pass the same arguments in every process, including prompts and seeds.")
        return requests

    def _check_prepared(self, params: Any) -> None:
        leaves = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=is_quantized)
        kept, given = ([path for path, x in leaves(made) if is_quantized(x)] for made in (self.prepared, params))
        if kept != given:
            raise ConfigError(
                f"Generator: the model keeps {len(kept)} of its parameters as integers, but {len(given)} of the "
                "given parameters are integers. Remedy: params = generator.prepare(params)."
            )

    def _stream(self, params: Any, requests: Sequence[Request], first: int) -> Iterator[list[int]]:
        before: list[int] = []
        for number, found in enumerate(self._steps(params, requests)):
            tokens = found
            if self._pipeline is not None:
                if number:
                    # The first group is one step ahead of the others.
                    pairs = enumerate(zip(before, found, strict=True))
                    tokens = [old if row % self._pipeline.stages == 0 else new for row, (old, new) in pairs]
                before = found
                if number == 1:
                    continue
            if BROKEN in tokens:
                raise DivergedError(
                    f"Generator: the logits of request {first + tokens.index(BROKEN)} are not finite. "
                    "Remedy: check the checkpoint's parameters and the compute dtype."
                )
            if all(token == NONE for token in tokens):
                return
            yield tokens

    def _steps(self, params: Any, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield the tokens of the prefill and of each decode step."""
        state, found = self.prefill(params, self.prompts(requests))
        try:
            for _ in range(max(request.most for request in requests) + (self._pipeline is not None)):
                # Dispatch the next step before the host reads this step's tokens.
                state, upcoming = self.decode(params, state)
                yield np.asarray(found).tolist()[: len(requests)]
                found = upcoming
        finally:
            if self._multiprocess:
                jax.block_until_ready(state.tokens)  # collectives of two concurrent programs could be matched

    def _partitioned(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``run``, with other operations where the partitioner would compute wrong numbers."""

        @functools.wraps(run)
        def correct(params: Any, carried: Any) -> Any:
            with tracing_under(self.layout):
                specs = [x.sharding.spec for x in jax.tree.leaves((self.prepared, self.abstract))]
                return avoid_faults(run, specs)(params, carried)

        return correct

    def _prefill(self, params: Any, prompts: dict[str, jax.Array]) -> tuple[Decoding, jax.Array]:
        tokens_BS, lengths_B = prompts["tokens"], prompts["lengths"]
        with _under(self.layout, self._long):
            model = self._state.metadata.kind.merge(params, self._state.variables)
            if self._pipeline is not None:
                empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract.cache)
                x, cache = self._pipeline.prefill(model, tokens_BS, lengths_B, self._shard_cache(empty), self.slots)
            else:
                x, cache = self.cached.prefill(model, tokens_BS, self.slots)
        with _under(self.layout, self._short):
            x = x if self._pipeline is not None else last_of(x, lengths_B)
            moving = None if self._pipeline is None else self._pipeline.initial_activations(model)
            state = Decoding(
                self._shard_cache(cache), lengths_B * 0, lengths_B - 1, prompts["left"], prompts["keys"], moving
            )
            return self._sample(state, self.cached.logits(model, x))

    def _decode(self, params: Any, state: Decoding) -> tuple[Decoding, jax.Array]:
        with _under(self.layout, self._short):
            model = self._state.metadata.kind.merge(params, self._state.variables)
            if self._pipeline is not None:
                return self._decode_pipelined(self._pipeline, model, state)
            x, cache = self.cached.step(model, state.tokens, state.at, state.cache)
            return self._sample(replace(state, cache=self._shard_cache(cache)), self.cached.logits(model, x))

    def _decode_pipelined(self, decoder: PipelinedDecoder, model: Any, state: Decoding) -> tuple[Decoding, jax.Array]:
        """Run one tick per stage; each tick draws the next tokens of one group."""
        names = ("tokens", "at", "left")

        def tick(carry: tuple[Decoding, jax.Array], t: jax.Array) -> tuple[tuple[Decoding, jax.Array], None]:
            state, found_B = carry
            out = (t + 1) % decoder.stages
            entering = decoder.take(state.tokens, t)
            x, moving, cache = decoder.tick(model, entering, t, state.at, state.moving["x"], state.cache)
            group = Decoding(None, *(decoder.take(getattr(state, name), out) for name in (*names, "keys")))
            after, drawn = self._sample(group, self.cached.logits(model, x))
            # In the first step after a prefill only the first group has passed all stages.
            ready = state.moving["ticks"] >= decoder.stages - 1
            rows = {}
            for name in names:
                rows_of_group = jnp.where(ready, getattr(after, name), getattr(group, name))
                rows[name] = decoder.put(getattr(state, name), rows_of_group, out)
            found_B = decoder.put(found_B, jnp.where(ready, drawn, PENDING), out)
            moving = {"x": moving, "ticks": state.moving["ticks"] + 1}
            rows = {name: hint(x, "batch") for name, x in rows.items()}
            return (replace(state, cache=self._shard_cache(cache), moving=moving, **rows), hint(found_B, "batch")), None

        nothing = jnp.full_like(state.tokens, PENDING)
        carry, _ = jax.lax.scan(tick, (state, nothing), jnp.arange(decoder.stages, dtype=jnp.int32))
        return carry

    def _sample(self, state: Decoding, logits_BV: jax.Array) -> tuple[Decoding, jax.Array]:
        """Draw the next token of each row; return the updated state and the tokens."""
        live_B = state.left > 0
        drawn_B = jnp.where(live_B, next_tokens(self.sampling, logits_BV, state.keys, state.at + 1), NONE)
        ended_B = drawn_B < 0
        for token in self.stop:
            ended_B |= drawn_B == token
        small = {
            "tokens": jnp.maximum(drawn_B, 0),
            "at": state.at + live_B,
            "left": jnp.where(ended_B, 0, state.left - 1),
            "keys": state.keys,
        }
        return replace(state, **{name: hint(x, "batch") for name, x in small.items()}), drawn_B

    def _shard_cache(self, cache: Any) -> Any:
        return jax.tree.map(lambda x, place: hint(x, *place.dims), cache, self._cache())

    def _cache(self) -> Any:
        cache = self.cached.cache(self.batch, self.slots)
        if self._pipeline is None:
            return cache
        return jax.tree.map(self._pipeline.dims, cache, is_leaf=lambda x: isinstance(x, Tagged))

    def _abstract(self, cache: Any) -> Decoding:
        """Returns the decode state as shapes with shardings; ``cache`` already has them."""
        row = self._short.sharding(("batch",), (self.batch,))
        number = jax.ShapeDtypeStruct((self.batch,), jnp.int32, sharding=row)
        key = jax.eval_shape(lambda: jax.random.key(0)).dtype
        keys = jax.ShapeDtypeStruct((self.batch,), key, sharding=row)
        decoder = self._pipeline
        if decoder is None:
            return Decoding(cache, number, number, number, keys)
        # The activations between stages, as a prefill returns them.
        with _under(self.layout, self._short):
            merged = lambda params: self._state.metadata.kind.merge(params, self._state.variables)
            shapes = jax.eval_shape(lambda params: decoder.initial_activations(merged(params)), self.prepared)
        specs = {"x": decoder.spec(self._short), "ticks": PartitionSpec()}
        places = {name: NamedSharding(self.layout.mesh, spec) for name, spec in specs.items()}
        moving = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in shapes.items()}
        return Decoding(cache, number, number, number, keys, moving)

    def _padded(self, longest: int) -> int:
        """Returns the padded prompt length, which the rules can shard."""
        num_shards = math.lcm(*(shards_of(self.layout, dim) for dim in self.cached.sequence))
        # Twice the number of shards, because a zigzag ring splits each shard in two.
        return -(-max(_MIN_PADDED, 1 << (longest - 1).bit_length()) // (2 * num_shards)) * 2 * num_shards


def with_cache(layout: Layout) -> Layout:
    """Returns the layout with a rule for the cache's slots, which shards them as ``seq`` if the rules have none."""
    table = layout.rules.table
    if CACHE_SEQ in table:
        return layout
    return replace(layout, rules=layout.rules.replace(**{CACHE_SEQ: table.get("seq")}))


def shards_of(layout: Layout, dim: str) -> int:
    """Returns the number of shards of a dim under the rules."""
    return math.prod(layout.sizes.get(axis, 1) for axis in layout.resolve((dim,)).axes[0])


@contextmanager
def _under(layout: Layout, own: Layout) -> Iterator[None]:
    """Trace under ``own``, which is ``layout`` with other sequence rules; raise if a third layout is ambient."""
    with tracing_under(layout), ambient_layout(own):
        yield
