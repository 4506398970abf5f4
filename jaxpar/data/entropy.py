"""Entropy of a text in nats per token: the lowest losses of a context-free model and of a bigram model.

A language model makes use of its depth only below :func:`bigram_entropy`, because one token of context and no attention
suffice to reach that loss. Both functions are plug-in estimates on the text that they are given. No model of that
order, however it was trained, reaches a lower mean loss on that text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxpar.errors import DataError

# The pair table has vocab**2 int64 cells: 128 MiB at this size, four times as much for each doubling.
MAX_BIGRAM_VOCAB = 4096

# Tokens counted at a time. np.bincount requires int64, so counting a byte text in one call would need 8x its memory.
_CHUNK = 1 << 20


def unigram_entropy(tokens: npt.ArrayLike, vocab: int = 256) -> float:
    """Returns the empirical entropy of one token in nats: a lower bound for any context-free model of this text.

    With ``c_a`` the number of times token ``a`` occurs among the ``n`` tokens::

        H(x) = sum_a (c_a / n) * ln(n / c_a)

    Args:
        tokens: integers in ``[0, vocab)``, shape ``[n]``, ``n >= 1``.
        vocab: number of possible tokens.

    Returns:
        Nats per token, between 0 and ``ln(vocab)``.

    Raises:
        DataError: ``tokens`` is empty, not one-dimensional, not integer, or has a value outside ``[0, vocab)``.

    >>> round(unigram_entropy([0, 1, 0, 1]), 6)  # ln 2
    0.693147
    """
    array = _checked(tokens, vocab, least=1)
    counts = np.zeros(vocab, np.int64)
    for start in range(0, array.size, _CHUNK):
        counts += np.bincount(array[start : start + _CHUNK].astype(np.int64), minlength=vocab)
    seen = counts[counts > 0]
    return float(np.sum(seen * (np.log(array.size) - np.log(seen))) / array.size)


def bigram_entropy(tokens: npt.ArrayLike, vocab: int = 256) -> float:
    """Returns the empirical entropy H(x_t | x_{t-1}) in nats: a lower bound for any bigram model of this text.

    With ``c_ab`` the number of times ``b`` directly follows ``a`` among the ``n - 1`` neighbouring pairs, and
    ``c_a = sum_b c_ab``::

        H(x_t | x_{t-1}) = sum_ab (c_ab / (n - 1)) * ln(c_a / c_ab)

    The bound holds for the mean loss over tokens 1 to n-1, each predicted from the one before it.

    Args:
        tokens: integers in ``[0, vocab)``, shape ``[n]``, ``n >= 2``.
        vocab: number of possible tokens, at most ``MAX_BIGRAM_VOCAB``.

    Returns:
        Nats per predicted token, between 0 and ``unigram_entropy(tokens[1:], vocab)``.

    Raises:
        DataError: ``tokens`` has fewer than two values, is not one-dimensional, not integer, or has a value outside
            ``[0, vocab)``; or ``vocab`` is above ``MAX_BIGRAM_VOCAB``.

    >>> bigram_entropy([0, 1, 0, 1])  # each token tells the next
    0.0
    >>> round(bigram_entropy([0, 0, 1, 1, 0]), 6)  # each token is followed by either, equally often
    0.693147
    """
    if vocab > MAX_BIGRAM_VOCAB:
        raise DataError(
            f"bigram_entropy counts pairs in a table of vocab**2 cells: vocab={vocab} is above {MAX_BIGRAM_VOCAB}. "
            "Remedy: measure byte tokens (vocab=256), or use unigram_entropy, whose table is vocab cells."
        )
    array = _checked(tokens, vocab, least=2)
    pairs = np.zeros(vocab * vocab, np.int64)
    for start in range(0, array.size - 1, _CHUNK):
        stop = min(start + _CHUNK, array.size - 1)
        chunk = array[start : stop + 1].astype(np.int64)
        cells = chunk[:-1] * vocab + chunk[1:]
        pairs += np.bincount(cells, minlength=vocab * vocab)
    table = pairs.reshape(vocab, vocab)
    before, after = np.nonzero(table)
    seen = table[before, after]
    # Summed term by term: every term is >= 0, and exactly 0 where `after` is certain. A difference of sums is not.
    return float(np.sum(seen * (np.log(table.sum(axis=1)[before]) - np.log(seen))) / (array.size - 1))


def _checked(tokens: npt.ArrayLike, vocab: int, least: int) -> np.ndarray:
    """Returns ``tokens`` as an integer array [n], ``n >= least``, with values in ``[0, vocab)``; or raise DataError."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size < least:
        raise DataError(f"tokens must have shape [n] with n >= {least} to measure an entropy, got {array.shape}.")
    if array.dtype.kind not in "iu":
        raise DataError(
            f"tokens must be integers, got dtype {array.dtype}. Remedy: encode the text to token ids first."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab:
        remedy = "token ids start at 0" if low < 0 else f"pass vocab={high + 1} or more"
        raise DataError(f"tokens must be in [0, {vocab}), got values from {low} to {high}. Remedy: {remedy}.")
    return array
