"""Entropies against values computed by hand, the inequalities of information theory, and a second implementation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import bigram_entropy, entropy, unigram_entropy
from jaxpar.errors import DataError

VOCAB = 5
texts = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=60)


def test_unigram_by_hand() -> None:
    assert unigram_entropy([0, 0, 1, 2]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert unigram_entropy([7, 7, 7]) == 0.0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))


def test_bigram_by_hand() -> None:
    # Pairs 00 01 10 00 01: after 0 come 0 0 1 1 (ln 2 each, 4 of 5 pairs), after 1 comes 0 (certain).
    assert bigram_entropy([0, 0, 1, 0, 0, 1]) == pytest.approx(0.8 * math.log(2))
    # Pairs 01 10 02 20 00: after 0 come 1, 2 and 0 with equal probability (ln 3 each, 3 of 5 pairs).
    assert bigram_entropy([0, 1, 0, 2, 0, 0]) == pytest.approx(3 / 5 * math.log(3))


def test_a_deterministic_sequence_has_no_bigram_entropy_at_all() -> None:
    cycle = np.tile(np.arange(7, dtype=np.uint8), 50)
    assert bigram_entropy(cycle) == 0.0  # exactly: not the rounding error of a difference of two sums
    assert unigram_entropy(cycle) == pytest.approx(math.log(7))


@given(texts)
def test_conditioning_never_adds_entropy(tokens: list[int]) -> None:
    after_the_first = unigram_entropy(tokens[1:], VOCAB)
    assert 0.0 <= bigram_entropy(tokens, VOCAB) <= after_the_first + 1e-12
    assert after_the_first <= math.log(VOCAB) + 1e-12


@given(texts)
def test_agrees_with_counting_pairs_one_by_one(tokens: list[int]) -> None:
    pairs = Counter(pairwise(tokens))
    firsts = Counter(tokens[:-1])
    losses = [-math.log(pairs[a, b] / firsts[a]) for a, b in pairwise(tokens)]
    assert bigram_entropy(tokens, VOCAB) == pytest.approx(sum(losses) / len(losses), abs=1e-12)


@given(texts, st.lists(st.integers(1, 50), min_size=VOCAB**2, max_size=VOCAB**2))
def test_no_bigram_model_scores_below_it(tokens: list[int], weights: list[int]) -> None:
    table = np.asarray(weights, float).reshape(VOCAB, VOCAB)
    table /= table.sum(axis=1, keepdims=True)
    loss = -np.log(table[tokens[:-1], tokens[1:]]).mean()
    assert bigram_entropy(tokens, VOCAB) <= loss + 1e-12


@given(st.permutations(range(VOCAB)), texts)
def test_renaming_tokens_changes_nothing(names: list[int], tokens: list[int]) -> None:
    renamed = np.asarray(names)[tokens]
    assert unigram_entropy(renamed, VOCAB) == pytest.approx(unigram_entropy(tokens, VOCAB), abs=1e-12)
    assert bigram_entropy(renamed, VOCAB) == pytest.approx(bigram_entropy(tokens, VOCAB), abs=1e-12)


@pytest.mark.parametrize("length", [6, 7, 8, 9, 50])
def test_counting_in_chunks_loses_no_token_and_no_pair(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length)
    whole = unigram_entropy(tokens, VOCAB), bigram_entropy(tokens, VOCAB)
    monkeypatch.setattr(entropy, "_CHUNK", 7)
    assert (unigram_entropy(tokens, VOCAB), bigram_entropy(tokens, VOCAB)) == whole


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_the_integer_type_does_not_matter(dtype: type[np.integer[Any]]) -> None:
    tokens = [200, 3, 200, 200, 3, 255, 200]  # 255 * 256 + 200 overflows the small types
    assert bigram_entropy(np.asarray(tokens, dtype)) == bigram_entropy(tokens)
    assert unigram_entropy(np.asarray(tokens, dtype)) == unigram_entropy(tokens)


@pytest.mark.parametrize("measure", [unigram_entropy, bigram_entropy])
@pytest.mark.parametrize(
    ("tokens", "vocab", "words"),
    [
        ([], 4, "(0,)"),
        ([[0, 1], [1, 0]], 4, "(2, 2)"),
        ([0.5, 1.0], 4, "float64"),
        ([0, 1, 4], 4, "vocab=5"),
        ([-1, 1], 4, "-1 to 1"),
    ],
)
def test_unusable_tokens_are_refused(measure: Callable[..., float], tokens: list[Any], vocab: int, words: str) -> None:
    with raises(DataError, words):
        measure(np.asarray(tokens), vocab)


def test_bigram_refuses_what_it_cannot_count() -> None:
    with pytest.raises(DataError, match="n >= 2"):
        bigram_entropy([1])
    with raises(DataError, "vocab=50000"):
        bigram_entropy([0, 1], vocab=50_000)
