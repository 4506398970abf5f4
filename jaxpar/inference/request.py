"""Generation requests, and the checks that run before any of them is generated."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import ConfigError

SEEDS = 2**32
"""Number of valid seeds: 0 to ``SEEDS - 1``."""
type Spell = Callable[[str, int], str]
"""``spell(name, value)``: how the user writes an argument and its value; for remedies in error messages."""


@dataclass(frozen=True)
class Request:
    """A prompt, the maximum number of tokens to generate, and the seed of the request's PRNG key."""

    tokens: tuple[int, ...]
    most: int
    seed: int = 0

    def summary(self) -> str:
        """Returns one line that differs whenever two requests differ.

        >>> Request((1, 2, 3), 5).summary()
        '3 tokens (sha256 8a6ae1512200), most=5, seed=0'
        """
        digest = hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()
        return f"{len(self.tokens)} tokens (sha256 {digest[:12]}), most={self.most}, seed={self.seed}"


def check_requests(
    prompts: Sequence[Sequence[int]],
    most: int | Sequence[int],
    seeds: Sequence[int] | None,
    *,
    slots: int,
    vocab: int,
    spell: Spell = "{}={}".format,
) -> list[Request]:
    """Returns the requests after checking that they fit the cache and the vocabulary.

    Args:
      prompts: the tokens of each request.
      most, seeds: as for :meth:`jaxpar.Generator.stream`.
      slots: cache slots per row.
      vocab: vocabulary size of the model.
      spell: how the user writes the arguments ``slots`` and ``most``, for remedies.

    Raises:
      ConfigError: a request does not fit; the error names it.
    """
    given = list(prompts)
    if not given:
        raise ConfigError("generate: no prompts were given. Remedy: pass at least one.")
    one = _integer(most)
    limits = [one] * len(given) if one is not None else _per_prompt("most", most)
    numbers = list(range(len(given))) if seeds is None else _per_prompt("seeds", seeds)
    for name, values in (("most", limits), ("seeds", numbers)):
        if len(values) != len(given):
            raise ConfigError(
                f"generate: got {len(given)} prompts, but {len(values)} values of {name}. Remedy: pass one "
                "value per prompt."
            )
    found = []
    for number, (prompt, limit, seed) in enumerate(zip(given, limits, numbers, strict=True)):
        tokens = _integers(prompt)
        if tokens is None:
            raise ConfigError(
                f"generate: request {number} must be a list of integer tokens, got {prompt!r:.60}. Remedy: pass "
                "a tokenizer's output, such as [[1, 2, 3], [4]] for two requests."
            )
        if not tokens or limit < 1:
            raise ConfigError(
                f"generate: request {number} has {len(tokens)} prompt tokens and requests {limit} new "
                "tokens. Both must be at least 1."
            )
        if not 0 <= seed < SEEDS:
            raise ConfigError(f"generate: request {number}: seed must be from 0 to {SEEDS - 1}, got {seed}.")
        wrong = next((at for at, token in enumerate(tokens) if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ConfigError(
                f"generate: request {number} has token {tokens[wrong]} at position {wrong}, but the model's "
                f"vocabulary has {vocab} tokens (0 to {vocab - 1}). Remedy: use the tokenizer that the model "
                "was trained with."
            )
        total = len(tokens) + limit
        if total > slots:
            room = slots - len(tokens)
            shorter = f", or set {spell('most', room)}" if room > 0 else ""
            raise ConfigError(
                f"generate: request {number} has {len(tokens)} prompt tokens and requests {limit} new "
                f"tokens, {total} in total, but the cache has {slots} slots. Remedy: set "
                f"{spell('slots', total)} or more, shorten the prompt{shorter}."
            )
        found.append(Request(tuple(tokens), limit, seed))
    return found


def check_top_k(top_k: int | None, vocab: int) -> None:
    """Raise a ``ConfigError`` if ``top_k`` exceeds the vocabulary."""
    if top_k is not None and top_k > vocab:
        raise ConfigError(
            f"sampling: top_k is {top_k}, but the model's vocabulary has {vocab} tokens. Remedy: lower "
            "top_k, or omit it to sample from all tokens."
        )


def _per_prompt(name: str, values: Any) -> list[int]:
    known = _integers(values)
    if known is None:
        kind = "an integer or one integer" if name == "most" else "one integer"
        raise ConfigError(f"generate: {name} must be {kind} per prompt, got {values!r:.60}.")
    return known


def _integers(values: Any) -> list[int] | None:
    """Returns the values as ints, or ``None`` if they are not an iterable of integers."""
    found = [_integer(value) for value in values] if isinstance(values, Iterable) else [None]
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else None


def _integer(value: Any) -> int | None:
    """Returns ``value`` as an int if it is an integer of any kind (numpy's too), else ``None``."""
    try:
        return operator.index(value)
    except TypeError:
        return None
