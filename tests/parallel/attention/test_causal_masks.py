"""A mask is causal unless it sets ``causal=False``: a later token never changes an earlier result."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import MESHES, arrays, compiled, masks
from covers import covering
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.attention.mask import mask_of

WHERE = lambda q, k: (q + k) % 4 != 1
UNSAID: dict[str, Any] = {
    "nothing": {},
    "Mask()": {"mask": jp.Mask()},
    "window": {"mask": jp.Mask(window=8)},
    "window of one side": {"mask": jp.Mask(window=(5, 0))},
    "chunk": {"mask": jp.Mask(chunk=8)},
    "where": {"mask": jp.Mask(where=WHERE)},
    "function": {"mask": WHERE},
    "window, chunk, where": {"mask": jp.Mask(window=9, chunk=16, where=WHERE)},
}
"""Arguments of attention that neither set ``causal=False`` nor give a prefix."""


@given(masks(st.integers(1, 9), st.none() | st.just(WHERE)))
@examples()
def test_only_an_explicitly_bidirectional_mask_or_a_prefix_shows_later_keys(mask: jp.Mask) -> None:
    x = np.arange(14)
    later = x[None] > x[:, None]
    seen = np.broadcast_to(mask.visible(x[:, None], x[None]), (14, 14)) & later
    if mask.causal:
        assert not (seen & (x[None] >= (mask.prefix or 0))).any()


@given(st.integers(1, 9), st.none() | st.integers(0, 9))
def test_what_is_left_out_is_causal(size: int, prefix: int | None) -> None:
    for words in ({}, {"window": size}, {"window": (size, 0)}, {"chunk": size}, {"where": WHERE}):
        mask, said = (
            jp.Mask(**words, prefix=prefix),  # type: ignore[arg-type]
            jp.Mask(causal=True, **words, prefix=prefix),  # type: ignore[arg-type]
        )
        assert mask == said and hash(mask) == hash(said) and mask.causal is True
        assert replace(mask, prefix=3) == replace(said, prefix=3)
        assert replace(mask, causal=False).causal is False
    assert mask_of(None, WHERE) == mask_of(True, WHERE) == jp.Mask(where=WHERE)
    assert mask_of(False, WHERE) == jp.Mask(causal=False, where=WHERE) != jp.Mask(where=WHERE)
    assert pickle.loads(pickle.dumps(jp.Mask(window=size))) == jp.Mask(window=size)


def changed_later(x: list[np.ndarray], token: int) -> list[np.ndarray]:
    """The arrays with other queries, keys and values from ``token`` on."""
    return [np.concatenate([a[:, :token], 5 - 3 * a[:, token:]], 1) for a in x]


@pytest.mark.parametrize(("impl", "words"), covering(["dense", "flash"], UNSAID, keep=2, strength=1))
def test_a_later_token_changes_no_earlier_result(impl: str, words: str) -> None:
    check(impl, UNSAID[words])


@pytest.mark.parametrize(
    ("impl", "words"),
    covering(
        [impl for impl in MESHES if impl not in ("dense", "flash")],
        ["window", "function", "window, chunk, where"],
        keep=1,
        strength=1,
    ),
)
def test_nor_where_the_sequence_is_split(impl: str, words: str) -> None:
    check(impl, UNSAID[words])


def check(impl: str, words: dict[str, Any]) -> None:
    x, gradient = arrays(np.random.default_rng(0), 16, 16)
    run = compiled(impl, forward=True, **words, **({"q_offset": 0} if impl == "split_kv" else {}))
    before = run(x, gradient)[0]
    for token in (1, 5, 8, 15):
        after = run(changed_later(x, token), gradient)[0]
        np.testing.assert_array_equal(after[:, :token], before[:, :token])
        assert (after[:, token:] != before[:, token:]).any()


@pytest.mark.parametrize("impl", few(sorted(MESHES, key=lambda impl: impl != "ring"), 1))
def test_a_prefix_shows_its_own_tokens_to_each_other_and_no_others(impl: str) -> None:
    x, gradient = arrays(np.random.default_rng(1), 16, 16)
    run = compiled(impl, forward=True, mask=jp.Mask(prefix=6), **({"q_offset": 0} if impl == "split_kv" else {}))
    before = run(x, gradient)[0]
    for token in (6, 11):
        np.testing.assert_array_equal(run(changed_later(x, token), gradient)[0][:, :token], before[:, :token])
    assert (run(changed_later(x, 5), gradient)[0][:, :5] != before[:, :5]).any()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ({"window": (3, 5)}, (3, 5)),
        ({"window": (3, None)}, (3, None)),
        ({"window": (None, 2)}, (None, 2)),
        ({"window": (None, None)}, (None, None)),
        ({"window": (3, 5), "causal": True}, (3, 5)),
    ],
    ids=str,
)
def test_a_causal_mask_drops_no_tokens_behind(words: dict[str, Any], remedy: tuple[Any, Any]) -> None:
    with raises(ConfigError, f"mask: window {remedy!r}".rsplit(maxsplit=1)[0]):
        jp.Mask(**words)


def test_causal_beside_no_limit_behind_limits_nothing() -> None:
    assert jp.Mask(causal=True, window=(3, None)).sides == (3, 0)
    with raises(ConfigError, "mask: window"):
        replace(jp.Mask(causal=False, window=(3, 5)), causal=True)
