"""Generation gives the same tokens in every layout and with or without a cache; also sampling, the collectives of a
decode step, and rejected requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from generators import CONFIG, MOST, PROMPTS, RULES, SLOTS, generator, one_device
from interpreters import outputs_of, two_processes
from jax.sharding import NamedSharding, PartitionSpec
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, DivergedError, JaxparError, LayoutError
from jaxpar.inference.sampling import BROKEN, next_tokens
from jaxpar.models.llama import LlamaConfig, make_llama


@dataclass(frozen=True)
class Reference:
    model: jp.Generator
    params: Any
    made: list[list[int]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = generator(one_device())
    params = generators.parameters(model)
    return Reference(model, params, model.generate(params, PROMPTS, most=MOST))


@pytest.mark.slow
def test_a_cache_gives_what_a_plain_forward_gives(reference: Reference) -> None:
    state = jp.abstract_state(reference.model.layout, make_llama(CONFIG), optax.identity())
    forward = jax.jit(lambda params, tokens: state.metadata.kind.merge(params, {})(tokens))
    for prompt, made, most in zip(PROMPTS, reference.made, MOST, strict=True):
        tokens = list(prompt)
        for _ in range(most):
            with reference.model.layout:
                logits = forward(reference.params, jnp.array([tokens + [0] * (SLOTS - len(tokens))]))
            tokens.append(int(logits[0, len(tokens) - 1].argmax()))
        assert made == tokens[len(prompt) :]
    assert len({token for made in reference.made for token in made}) > 8, "tokens that say something"


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2, "context": 2, "model": 2},
        pytest.param({"data": 2, "context": 2, "model": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_device(mesh: dict[str, int], reference: Reference) -> None:
    """Covers tensor, fully sharded data and context parallelism, a sequence sharded for a ring, and layers over
    stages."""
    model = generator(jp.MeshSpec(**mesh).build())
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), reference.params, model.params)
    assert model.generate(params, PROMPTS, most=MOST) == reference.made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4d", "hybrid", "tp_25d", "tp_3d"])  # the others have a part of these axes and rules
def test_each_layout_of_the_repository_gives_the_tokens_of_one_device(name: str, reference: Reference) -> None:
    layout = jp.Layout.from_yaml(Path(__file__).parents[2] / f"configs/layouts/{name}.yaml")
    model = generator(layout.mesh, layout.rules)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), reference.params, model.params)
    assert model.generate(params, PROMPTS, most=MOST) == reference.made


@pytest.mark.slow
def test_tokens_are_those_of_one_device_in_two_processes(reference: Reference, tmp_path: Path) -> None:
    """Two processes of two devices hold one pipeline stage each; both receive all tokens, and an error in one process
    is raised by both."""
    flags = (
        "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    with two_processes(generators.__file__, tmp_path, flags=flags) as workers:
        outputs_of(workers, timeout=240)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] and found[0]["across"]
    assert found[0]["made"] == reference.made
    assert found[0]["errors"] == [
        (
            "process 1 of 2: generate: request 0 has 40 prompt tokens and requests 1 new tokens, 41 in total, "
            "but the cache has 32 slots. Remedy: set slots=41 or more, shorten the prompt."
        ),
        (
            "Generator: request 1 differs between processes: 2 tokens (sha256 46584c88c62d), most=1, seed=5 in "
            "process 0, 2 tokens (sha256 46584c88c62d), most=1, seed=6 in process 1 of 2. Remedy: pass the same "
            "arguments in every process, including prompts and seeds."
        ),
    ]


def test_a_request_is_alone_beside_others(reference: Reference) -> None:
    """A request gives the same tokens in any row, with any neighbours, and when requests outnumber rows and run in
    turns."""
    model, params, made = reference.model, reference.params, reference.made
    order = [3, 0, 2, 1, 0, 3]
    again = model.generate(params, [PROMPTS[i] for i in order], most=[MOST[i] for i in order])
    assert again == [made[i] for i in order]
    steps = list(model.stream(params, PROMPTS[:2], most=MOST[:2]))
    assert [[step[row] for step in steps] for row in (0, 1)] == [made[0], made[1] + [-1] * 3]


@pytest.mark.slow
def test_drawn_with_each_requests_own_key_until_a_stop(reference: Reference) -> None:
    stop = range(0, 64, 16)
    model, params = (
        generator(one_device(), stop=stop, sampling=jp.inference.Sampling(temperature=1.5, top_k=20, top_p=0.9)),
        reference.params,
    )
    steps = np.array(list(model.stream(params, PROMPTS, most=12, seeds=[1, 2, 3, 4])))
    made = model.generate(params, PROMPTS, most=12, seeds=[1, 2, 3, 4])
    ends = [next((at for at, token in enumerate(row) if token in stop), None) for row in steps.T.tolist()]
    assert None in ends and any(ends), "some end by a stop token, and some do not"
    for row, end, tokens in zip(steps.T.tolist(), ends, made, strict=True):
        assert tokens == row[:end] and set(row[len(row) if end is None else end + 1 :]) <= {-1}
    assert model.generate(params, PROMPTS[::-1], most=12, seeds=[4, 3, 2, 1]) == made[::-1]
    assert model.generate(params, PROMPTS, most=12, seeds=[5, 2, 3, 4])[0] != made[0]


def test_a_decode_step_gathers_nothing_and_writes_in_place() -> None:
    """With weights replicated or sharded over ``model`` and the cache over ``context`` and ``model``, only sums of
    small arrays cross the mesh."""
    rules = RULES.replace(params={"embed": None})
    model = generator(jp.MeshSpec(data=2, context=2, model=2).build(), rules, slots=256)
    program = model.decode.lower(model.params, model.abstract).compile()
    audit = jp.audit(program, mesh=model.layout.mesh)
    assert {c.kind for c in audit.collectives} == {"all-reduce"}
    # In each layer, for a device's 2 rows and 2 heads: a maximum, and the sum of the results [rows, heads, head_dim]
    # with their weights.
    over = audit.select(axis="context")
    assert sum(c.result_bytes * c.count for c in over) == CONFIG.layers * 4 * 2 * 2 * (1 + 1 + CONFIG.head_dim)
    cache = 2 * CONFIG.layers * 4 * CONFIG.kv_heads * 256 * CONFIG.head_dim * 4
    assert model.abstract.cache["keys"].sharding.spec == PartitionSpec(None, "data", "model", "context", None)
    assert audit.memory["alias"] >= cache // 8
    assert max(c.result_bytes for c in audit.collectives) < cache // 8 // 10


def test_stages_keep_their_weights_and_cache_and_send_activations() -> None:
    """Each tick of a group sends its token's activations to the next stage, and from the last stage to all; nothing is
    gathered over the pipeline."""
    rules = RULES.replace(params={"embed": None}, vocab=("pipeline", "model"))
    model = generator(jp.MeshSpec(pipeline=2, data=2, model=2).build(), rules, slots=256)
    assert model.abstract.cache["keys"].sharding.spec == PartitionSpec("pipeline", "data", "model", None, None)
    program = model.decode.lower(model.prepared, model.abstract).compile()
    audit = jp.audit(program, mesh=model.layout.mesh)
    assert {c.kind for c in audit.collectives} == {"all-reduce", "collective-permute"}
    token = 4 // 2 // 2 * CONFIG.embed * 4  # a device's rows of one group
    over = audit.select(axis="pipeline")
    # The stages' transfers, to the next stage and from the last to all; the lookup in a table that is sharded over all
    # axes; and the argmax of sharded logits, which is a number and an index for each row.
    assert sorted(c.result_bytes for c in over) == [4, 4, token, token, token]
    assert {c.count for c in over} == {2}
    cache = 2 * CONFIG.layers * 4 * CONFIG.kv_heads * 256 * CONFIG.head_dim * 4
    assert audit.memory["alias"] >= cache // 8
    assert audit.memory["argument"] - audit.memory["alias"] < model.explain().total("params").device_bytes + 200


HEADS = {
    "keys whole": (8, 4, {"model": 4, "context": 2}, {"heads": "model", "kv_heads": None}),
    "a key head a device": (8, 4, {"model": 2, "context": 4}, {"heads": "model", "kv_heads": None}),
    # Query heads per device and query heads per key head: 3 and 2; 4 and 3; 6 and 4; 10 and 4; 1 and 6.
    "6 and 3 over 2": (6, 3, {"model": 2, "context": 2}, {"heads": "model", "kv_heads": None}),
    "12 and 4 over 3": (12, 4, {"model": 3, "context": 2}, {"heads": "model", "kv_heads": None}),
    "12 and 3 over 2": (12, 3, {"model": 2}, {"heads": "model", "kv_heads": None}),
    "20 and 5 over 2": (20, 5, {"model": 2, "context": 4}, {"heads": "model", "kv_heads": None}),
    "6 and 1 over 6": (6, 1, {"model": 6}, {"heads": "model", "kv_heads": None}),
    "6 and 3 over 2 x 3": (6, 3, {"model": 3, "ulysses": 2}, {"heads": ("ulysses", "model"), "kv_heads": None}),
    "keys split, queries whole": (8, 4, {"model": 2, "context": 4}, {"heads": None, "kv_heads": "model"}),
    "keys over fewer axes": (8, 2, {"model": 2, "ulysses": 2}, {"heads": ("ulysses", "model"), "kv_heads": "model"}),
    "keys over other axes": (8, 4, {"model": 2, "ulysses": 2}, {"heads": "ulysses", "kv_heads": "model"}),
    "keys that give way to slots": (
        8,
        4,
        {"model": 2, "context": 2},
        {"heads": None, "kv_heads": jp.first_of("context", None)},
    ),
}


@pytest.mark.parametrize("case", few(HEADS, 4))
def test_queries_find_their_keys_however_heads_are_sharded(case: str) -> None:
    heads, kv_heads, mesh, rule = HEADS[case]
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 1, n, 4)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    cache = {name: rng.normal(size=(2, 3, kv_heads, 16, 4)).astype(np.float32) for name in ("keys", "values")}
    at = np.array([0, 7, 15], np.int32)
    rules = jp.Rules(batch=None, head_dim=None, cache_seq="context", **rule)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    with jp.Layout(jp.MeshSpec(**mesh).build(devices), rules):
        o, after = jax.jit(jp.inference.cached_attention)(q, k, v, cache, 1, at)
    for row, last in enumerate(at):
        cache["keys"][1, row, :, last], cache["values"][1, row, :, last] = k[row, 0], v[row, 0]
        for head in range(heads):
            of_key = head // (heads // kv_heads)
            scores = cache["keys"][1, row, of_key, : last + 1] @ q[row, 0, head] / 2
            p = np.exp(scores - scores.max())
            want = p / p.sum() @ cache["values"][1, row, of_key, : last + 1]
            np.testing.assert_allclose(o[row, 0, head], want, rtol=1e-5, atol=1e-6)
    for name, want in cache.items():
        np.testing.assert_array_equal(after[name], want)


def test_what_is_drawn_from() -> None:
    logits = jnp.log(jnp.array([[0.02, 0.5, 0.08, 0.3, 0.1]]))
    many = jnp.broadcast_to(logits, (4000, 5))
    keys = jax.vmap(jax.random.key)(jnp.arange(4000, dtype=jnp.uint32))
    at = jnp.zeros(4000, jnp.int32)
    rules, draw = jp.Rules(batch=None), jax.jit(next_tokens, static_argnums=0)

    def shares(**how: Any) -> np.ndarray:
        with jp.Layout(one_device(), rules):
            drawn = draw(jp.inference.Sampling(**how), many, keys, at)
        return np.bincount(np.asarray(drawn), minlength=5) / 4000

    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.85), [0, 5 / 9, 0, 3 / 9, 1 / 9], atol=0.03)
    np.testing.assert_allclose(shares(temperature=0.5, top_k=2), [0, 25 / 34, 0, 9 / 34, 0], atol=0.03)
    assert shares()[1] == shares(temperature=1e-40)[1] == shares(temperature=1.0, top_k=1)[1] == 1
    other = jax.random.normal(jax.random.key(0), (8, 64)) * 3
    split = jp.Layout(jp.MeshSpec(data=4, model=2).build(), RULES)
    every = []
    for layout in (jp.Layout(one_device(), RULES), split):
        with layout:
            laid = jp.shard_array(layout, np.asarray(other), "batch", "vocab")
            every.append(draw(jp.inference.Sampling(1.0, 9, 0.8), laid, keys[:8], at[:8]).tolist())
    assert every[0] == every[1]
    ties = jnp.array([[0.0, 2, 2, 1, 2], [0, 0, jnp.nan, 1, 2]])
    with jp.Layout(one_device(), rules):
        assert next_tokens(jp.inference.Sampling(), ties, keys[:2], at[:2]).tolist() == [1, BROKEN]


def test_logits_that_are_not_finite_end_it(reference: Reference) -> None:
    broken = {**reference.params, "norm": {"scale": reference.params["norm"]["scale"] * jnp.nan}}
    with raises(DivergedError, "Generator", "request 0"):
        reference.model.generate(broken, PROMPTS, most=2)
    with raises(DivergedError, "Generator", "request 4"):
        list(reference.model.stream(broken, PROMPTS, most=2, first=4))


@pytest.mark.parametrize(
    ("prompts", "how", "name"),
    [
        ([[1], [2] * 20], {"most": 16}, "20"),
        ([[2] * 40], {"most": 1}, "40"),
        ([[1, 2, 64]], {"most": 1}, "64"),
        ([[1], []], {"most": 1}, "Both"),
        ([], {"most": 1}, "generate"),
        ([[1]], {"most": [1, 2]}, "generate: got 1"),
        ([[1]] * 5, {"most": 1}, "Generator: stream"),
        ([1, 2], {"most": 1}, "0 must"),
        ([[1], [1.5]], {"most": 1}, "[1.5]"),
        ([[1]], {"most": 2.0}, "generate: most"),
        ([[1]], {"most": 1, "seeds": 3}, "generate: seeds"),
        ([[1]], {"most": 1, "seeds": [-1]}, "4294967295"),
    ],
)
def test_requests_that_cannot_be(prompts: Any, how: Any, name: str, reference: Reference) -> None:
    with raises(ConfigError, name):
        reference.model.stream(reference.params, prompts, **how)


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: generator(jp.MeshSpec(context=8).abstract(8), slots=36), LayoutError, "context=8"),
        (lambda: generator(jp.MeshSpec(data=8).abstract(8), batch=3), LayoutError, "data=8"),
        (lambda: generator(one_device(), stop=[64]), ConfigError, "Generator: stop"),
        (lambda: generator(jp.MeshSpec(pipeline=2, data=4).abstract(8), batch=7), ConfigError, "Generator: batch"),
        (lambda: generator(one_device(), slots=0), ConfigError, "Generator: slots"),
        (lambda: jp.inference.Sampling(temperature=-1), ConfigError, "number, got -1"),
        *(
            (lambda value=value: jp.inference.Sampling(1.0, top_k=value), ConfigError, "top_k must")
            for value in (0, -1, 2.5, float("nan"))
        ),
        (lambda: generator(one_device(), sampling=jp.inference.Sampling(1.0, top_k=65)), ConfigError, "65"),
        *(
            (lambda value=value: jp.inference.Sampling(1.0, top_p=value), ConfigError, "sampling: top_p")
            for value in (0, -0.5, 1.5, float("nan"))
        ),
        *(
            (lambda value=value: jp.inference.Sampling(value), ConfigError, "sampling: temperature")
            for value in (float("inf"), float("nan"))
        ),
        (lambda: jp.inference.Sampling(top_k=3), ConfigError, "top_k and"),
    ],
)
def test_generators_that_cannot_be(make: Any, error: type[JaxparError], name: str) -> None:
    with raises(error, name):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "model", "kept"),
    [(6, 3, 2, {}), (12, 4, 3, {"cache": "int8"})],
    ids=["6 and 3 over 2", "12 and 4 over 3 in int8"],
)
def test_head_counts_that_training_takes_generate_the_tokens_of_one_device(
    heads: int, kv_heads: int, model: int, kept: Any
) -> None:
    config = LlamaConfig(vocab=64, embed=24, layers=1, heads=heads, kv_heads=kv_heads, head_dim=4, mlp=24)
    rules = RULES.replace(params={"embed": None}, vocab=None, kv_heads=jp.first_of("model", None))
    sizes: list[dict[str, int]] = [{"model": 1}, {"model": model}]
    made, params = [], None
    for size in sizes:
        mesh = jp.MeshSpec(**size).build(jax.devices()[: size["model"]])
        each = generator(mesh, rules, config, kept)
        params = generators.parameters(each, config) if params is None else params
        laid = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, each.params)
        made.append(each.generate(laid, PROMPTS, most=4))
    assert made[0] == made[1]
    assert len({token for row in made[0] for token in row}) > 4, "tokens that say something"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"batch": None, "kv_heads": "model", "cache_seq": None}, "4"),
        ({"batch": jp.first_of("model", "data"), "kv_heads": None, "cache_seq": "model"}, "data"),
    ],
    ids=["heads", "rows"],
)
def test_keys_that_lie_otherwise_than_queries_are_refused_where_all_axes_are_manual(
    rules: dict[str, Any], text: str
) -> None:
    x = lambda heads: jnp.zeros((2, 1, heads, 4))
    table = jp.Rules(**rules, heads=None, head_dim=None)
    cache = {name: jnp.zeros((1, 2, 2, 8, 4)) for name in ("keys", "values")}
    whole, specs = PartitionSpec(), (PartitionSpec(),) * 4
    with jp.Layout(jp.MeshSpec(model=2, data=2).build(jax.devices()[:4]), table), raises(LayoutError, text):
        local = lambda q, k, v, cache: jp.inference.cached_attention(q, k, v, cache, 0, jnp.zeros(2, jnp.int32))
        jax.shard_map(local, in_specs=specs, out_specs=(whole, whole), check_vma=False)(x(4), x(2), x(2), cache)


def test_a_layout_of_its_own_for_the_cache() -> None:
    """``cache_seq`` in the rules overrides ``seq``."""
    mesh = jp.MeshSpec(data=4, model=2).abstract(8)
    model = generator(mesh, RULES.replace(kv_heads=None, cache_seq="model"))
    where = model.abstract.cache["values"].sharding
    assert isinstance(where, NamedSharding)
    assert where.spec == PartitionSpec(None, "data", None, "model", None)
