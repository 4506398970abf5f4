"""What is asked of a generator, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to make of it at most, and the seed of its key."""

    tokens: tuple[int, ...]
    most: int
    seed: int = 0


def check_requests(
    prompts: Sequence[Sequence[int]],
    most: int | Sequence[int],
    seeds: Sequence[int] | None,
    *,
    slots: int,
    vocab: int,
) -> list[Request]:
    """Requests that fit a cache and a vocabulary.

    Raises:
      ConfigError: naming the request that does not.
    """
    limits = [most] * len(prompts) if isinstance(most, int) else list(most)
    numbers = list(range(len(prompts))) if seeds is None else list(seeds)
    if not prompts:
        raise ConfigError("generate: there is no prompt. Remedy: one or more.")
    for name, values in (("most", limits), ("seeds", numbers)):
        if len(values) != len(prompts):
            raise ConfigError(
                f"generate: {len(prompts)} prompts, but {len(values)} values of {name}. Remedy: one for each."
            )
    found = []
    for number, (prompt, limit, seed) in enumerate(zip(prompts, limits, numbers, strict=True)):
        tokens = tuple(int(token) for token in prompt)
        if not tokens or limit < 1:
            raise ConfigError(
                f"generate: request {number} has {len(tokens)} tokens and asks for {limit}, but 1 or more of both are wanted."
            )
        wrong = next((at for at, token in enumerate(tokens) if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ConfigError(
                f"generate: request {number} holds token {tokens[wrong]} at position {wrong}, but the model's vocabulary has {vocab} (0 to {vocab - 1}). "
                f"Remedy: the tokenizer that the model was trained with."
            )
        whole = len(tokens) + limit
        if whole > slots:
            room = slots - len(tokens)
            shorter = f", or most={room}" if room > 0 else ""
            raise ConfigError(
                f"generate: request {number} has {len(tokens)} tokens and asks for {limit} more, {whole} in all, but the cache has {slots} slots. "
                f"Remedy: slots={whole} or more, a shorter prompt{shorter}."
            )
        found.append(Request(tokens, limit, seed))
    return found
