"""Attention of one token to a cache, against the definition, with slots on one device and on several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp

RULES = jp.Rules(batch=None, heads="model", kv_heads="model", head_dim=None, cache_seq="context")
SLOTS, AT = 8, [0, 2, 5, 7]
WORDS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "the token alone": {"window": 1},
    "a window": {"window": 3},
    "a window across devices, a softcap": {"window": 6, "softcap": 2.0, "scale": 0.7},
}


@pytest.mark.parametrize("mesh", [{"data": 1}, {"context": 4, "model": 2}], ids=["one device", "sharded slots"])
@pytest.mark.parametrize("words", WORDS)
def test_a_token_attends_to_the_last_tokens_up_to_its_own(words: str, mesh: dict[str, int]) -> None:
    options, rng = WORDS[words], np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 3
    q, k, v = draw(4, 1, 4, 8), draw(4, 1, 2, 8), draw(4, 1, 2, 8)
    cache = {"keys": draw(2, 4, 2, SLOTS, 8), "values": draw(2, 4, 2, SLOTS, 8)}
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    with jp.Layout(jp.MeshSpec(**mesh).build(devices), RULES):
        attend = jax.jit(lambda *arrays: jp.inference.cached_attention(*arrays, 1, jnp.array(AT), **options))
        result, after = attend(q, k, v, cache)
    for row, last in enumerate(AT):
        for name, new in (("keys", k), ("values", v)):
            cache[name][1, row, :, last] = new[row, 0]
        first = max(0, last + 1 - options.get("window", SLOTS))
        for head in range(4):
            keys, values = (cache[name][1, row, head // 2, first : last + 1] for name in ("keys", "values"))
            scores = keys @ q[row, 0, head] * options.get("scale", 8**-0.5)
            scores = 2 * np.tanh(scores / 2) if "softcap" in options else scores
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ values
            np.testing.assert_allclose(result[row, 0, head], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after["keys"], cache["keys"])
    np.testing.assert_array_equal(after["values"], cache["values"])
