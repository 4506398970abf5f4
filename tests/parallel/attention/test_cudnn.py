"""cuDNN's attention: what jax's own function makes of the arguments, the calls for absent GPUs, and when it is used.

No test has a GPU. The values and gradients come from jax's implementation ``xla`` of the same public function, which
takes the same arguments as ``cudnn``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import documents, gap
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compile.compilers import COMPILERS
from jaxpar.analysis.hlo.flops import kernel_flops
from jaxpar.analysis.hlo.parser import parse
from jaxpar.parallel.attention import attention as global_attention
from jaxpar.parallel.attention.kernels import gpu_cudnn
from jaxpar.parallel.attention.kernels.select import find
from jaxpar.parallel.attention.options import read
from jaxpar.parallel.attention.tiled.tile import TileSpec

RULES = jp.Rules(batch="data", seq="ulysses", heads="model", kv_heads="model", head_dim=None)
QUICK = {"xla_backend_optimization_level": 0}
JAX_ATTENTION = jax.nn.dot_product_attention
needs_cudnn = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax[cuda13], which finds cuDNN, is gigabytes"
)


@pytest.fixture
def by_xla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Computes ``cudnn`` with the same arguments by ``xla``, takes the devices for GPUs; the shapes of the queries."""
    shapes = []

    def attend(*arrays: Any, implementation: str = "", **options: Any) -> Any:
        shapes.extend([arrays[0].shape] if implementation == "cudnn" else [])
        return JAX_ATTENTION(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(global_attention, "platform_of", lambda mesh: "gpu")
    return shapes


def arrays(batch: int, seq: int, heads: int, kv_heads: int, dims: tuple[int, int], dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(seq)
    shapes = [(heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1])]
    return tuple(jnp.asarray(rng.normal(size=(batch, seq, *shape)), dtype) for shape in shapes)


def both(f: Any, x: Any) -> list[np.ndarray]:
    """The result and the gradients of queries, keys and values."""

    def loss(*x: jax.Array) -> Any:
        o = f(*x).astype(jnp.float32)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)(*x)
    return [np.asarray(leaf, np.float32) for leaf in (o, *grads)]


CASES = [
    ((2, 64, 4, 2, (24, 24)), jp.Mask(), False),
    ((2, 37, 4, 1, (6, 10)), jp.Mask(window=9), False),
    ((2, 37, 2, 2, (20, 12)), jp.Mask(causal=False), False),
    ((2, 41, 4, 2, (16, 16)), jp.Mask(window=7), True),
    ((2, 40, 2, 1, (16, 16)), jp.Mask(causal=False), True),
    ((1, 12, 1, 1, (8, 8)), jp.Mask(causal=False, window=(2**31, 0)), False),
]
NAMES = ["causal", "window, odd sizes", "all tokens, odd", "documents in a window", "documents", "endless window"]


@pytest.mark.parametrize(("sizes", "mask", "packed"), few(CASES, 2, 3))
def test_jax_is_given_what_attention_is_asked_for(by_xla: list[Any], sizes: Any, mask: jp.Mask, packed: bool) -> None:
    x = arrays(*sizes)
    options: Any = {"mask": mask, "scale": 0.3} | ({"segment_ids": documents(sizes[1])} if packed else {})
    rules, beside, _ = read(*x, options)
    got = both(lambda *x: gpu_cudnn.cudnn(*x, rules, beside.segments), x)
    with jp.unsharded():
        want = both(lambda *x: jp.attention(*x, impl="dense", **options), x)
    assert gap(got, want) <= 5e-6


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_no_key_get_zero(by_xla: list[Any], causal: bool) -> None:
    """Queries and keys have ids of their own: query 2 sees a key only if it may see later ones, query 4 sees none."""
    x = arrays(1, 6, 1, 1, (8, 8))
    ids = np.array([[0, 0, 1, 1, 3, -1]]), np.array([[0, 0, 0, 1, 1, -1]])
    rules, beside, _ = read(*x, {"mask": jp.Mask(causal=causal), "segment_ids": ids})
    o = np.asarray(gpu_cudnn.cudnn(*x, rules, beside.segments))
    assert np.abs(o[0]).max((1, 2)).astype(bool).tolist() == [True, True, not causal, True, False, False]


@pytest.mark.parametrize(
    ("sizes", "packed"),
    few([({"ulysses": 2, "data": 2}, True), ({"data": 2, "model": 2}, False)], 1, names=2),
    ids=["ulysses", "heads"],
)
def test_on_attached_gpus_every_device_runs_cudnn(by_xla: list[Any], sizes: dict[str, int], packed: bool) -> None:
    x = arrays(4, 32, 4, 2, (16, 16), jnp.bfloat16)
    options: Any = {"segment_ids": np.tile(documents(32), (2, 1))} if packed else {}
    with jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[:4]), RULES):
        got = both(lambda *x: jp.attention(*x, **options), x)
    assert (2, 32, 2, 16) in by_xla  # two of four sequences and two of four heads
    with jp.unsharded():
        want = both(lambda *x: jp.attention(*x, impl="dense", **options), x)
    assert gap(got, want) <= 2e-2


def calls(text: str) -> list[tuple[str, ...]]:
    """The targets, configurations, types and layouts of the calls of cuDNN in a lowered program."""
    pattern = r'@(__cudnn\$\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)"(.*)$'
    found = []
    for name, config, rest in re.findall(pattern, text, re.MULTILINE):
        found.append((name, json.dumps(json.loads(config.replace("\\22", '"')), sort_keys=True), rest))
    return sorted(found)


def lowered(attached: bool, sizes: Any, mask: jp.Mask, packed: bool) -> str:
    """The program of a forward pass and of another with gradients, lowered for CUDA."""
    batch, seq, heads, kv_heads, (width, _) = sizes
    ids = jnp.asarray(documents(seq))
    attend = lambda *x: gpu_cudnn.cudnn(*x, TileSpec(mask, 0.3), (ids, ids) if packed else None, attached=attached)
    shapes = [jax.ShapeDtypeStruct((batch, seq, n, width), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    loss = lambda *x: jnp.sum(attend(*x).astype(jnp.float32))
    program = jax.jit(lambda *x: (attend(*x), jax.grad(loss, argnums=(0, 1, 2))(*x)))
    return program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@needs_cudnn
@pytest.mark.parametrize(("sizes", "mask", "packed"), CASES, ids=NAMES)
def test_the_calls_for_absent_gpus_are_those_of_jax(sizes: Any, mask: jp.Mask, packed: bool) -> None:
    ours, jaxs = (calls(lowered(attached, sizes, mask, packed)) for attached in (False, True))
    assert len(ours) == 3 and ours == jaxs


@needs_cudnn
def test_jax_refuses_what_find_does_not_know_about() -> None:
    """The widest head_dim depends on the GPU. Without one, jax takes it for older than Hopper."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.bfloat16)
    rules, beside, offset = read(x, x, x, {})
    assert find("gpu", (x, x, x), rules, beside, offset) == ("cudnn", "")
    assert find("gpu", (x, x, x), rules, beside, offset, attached=True) == (
        "",
        "jax cannot lower cuDNN's attention here: The head dim must be <= 128 and a multiple of 8, but got 256",
    )
    small = jax.ShapeDtypeStruct((1, 63, 2, 20), jnp.bfloat16)
    assert find("gpu", (small,) * 3, rules, beside, offset, attached=True).kernel == "cudnn"


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="this jax finds cuDNN")
def test_without_cudnn_attached_gpus_run_plain_jax() -> None:
    rules, beside, offset = read(HALF, HALF, HALF, {})
    assert find("gpu", (HALF, HALF, HALF), rules, beside, offset, attached=True) == (
        "",
        "jax cannot lower cuDNN's attention here: cuDNN is not detected",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_a_program_for_absent_gpus_states_mask_window_and_layouts(packed: bool) -> None:
    found = calls(lowered(False, (2, 40, 4, 2, (20, 20)), jp.Mask(window=9), packed))
    names = ["__cudnn$fmhaScaleBiasSoftmax" if packed else "__cudnn$fmhaSoftmax"] * 2
    assert [name for name, _, _ in found] == [*names, names[0] + "Backward"]
    for name, config, rest in found:
        options = json.loads(config)["cudnn_fmha_backend_config"]
        assert options["mask_type"] == "CAUSAL" and options["fmha_scale"] == 0.3
        assert options["sliding_window_length"] == (0 if packed else 9)
        assert options["intermediate_tensor_shape"]["dimensions"] == ["2", "4", "40", "40"]
        # The values are padded to a head_dim of 24; the results have heads before tokens, stored tokens first.
        assert "tensor<2x4x40x24xbf16>" in rest and "dense<[3, 1, 2, 0]>" in rest
        assert ("tensor<2x1x40x40xbf16>" in rest) is packed
        assert ("bmm1_grad_gemm1_dot_dimension_numbers" in options) is name.endswith("Backward")


def test_absent_gpus_take_attention_in_a_vmap() -> None:
    x = jax.ShapeDtypeStruct((3, 2, 16, 2, 8), jnp.bfloat16)
    rules = TileSpec(jp.Mask(), 0.3)
    mapped = jax.vmap(lambda *x: gpu_cudnn.cudnn(*x, rules, attached=False))
    assert jax.eval_shape(mapped, x, x, x).shape == x.shape


HALF = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
SINGLE = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float32)
BROAD = jax.ShapeDtypeStruct((1, 1024, 2, 320), jnp.float16)
LONG = jax.ShapeDtypeStruct((1, 16_384, 2, 64), jnp.bfloat16)
ODD = jax.ShapeDtypeStruct((1, 16_385, 2, 64), jnp.bfloat16)
IDS = {n: np.zeros((1, n), np.int32) for n in (1024, 16_384)}
NO = "cuDNN's attention does not support "


@pytest.mark.parametrize(
    ("x", "options", "why"),
    [
        (HALF, {}, ""),
        (HALF, {"mask": jp.Mask(causal=False), "scale": 0.1}, ""),
        (HALF, {"mask": jp.Mask(window=64)}, ""),
        (HALF, {"segment_ids": IDS[1024], "mask": jp.Mask(window=64)}, ""),
        (HALF, {"segment_ids": (IDS[1024], IDS[1024] + 1)}, ""),
        (ODD, {}, ""),
        (SINGLE, {}, "cuDNN's attention takes float16 and bfloat16, but the queries are float32"),
        (BROAD, {}, "cuDNN's attention takes a head_dim of at most 256, but it is 320"),
        (HALF, {"softcap": 3.0}, NO + "a soft cap"),
        (HALF, {"alibi": True, "dropout": 0.1, "key": 0}, NO + "alibi or dropout"),
        (HALF, {"mask": jp.Mask(causal=False, window=(9, 3))}, NO + "windows of later tokens"),
        (HALF, {"mask": jp.Mask(prefix=9, chunk=64)}, NO + "prefixes or chunks"),
        (HALF, {"mask": lambda q, k: q != k}, NO + "mask functions"),
        (HALF, {"q_offset": 5}, NO + "q_offset"),
        (HALF, {"prefix": np.array([4])}, NO + "prefixes"),
        (HALF, {"sinks": np.zeros(2, np.float32)}, NO + "sinks"),
        (HALF, {"bias": np.zeros((1, 2, 1024, 1024), np.float32)}, NO + "bias"),
        (
            LONG,
            {"segment_ids": IDS[16_384]},
            (
                "for segment_ids cuDNN's attention reads a mask of at most 67108864 scores of a sequence, but 16384 "
                "queries and 16384 keys have 268435456"
            ),
        ),
        (
            ODD,
            {"mask": jp.Mask(causal=False)},
            (
                "for an odd number of tokens cuDNN's attention reads a mask of at most 67108864 scores of a sequence, "
                "but 16385 queries and 16385 keys have 268468225"
            ),
        ),
    ],
)
def test_when_cudnn_runs_and_why_not(x: Any, options: Any, why: str) -> None:
    options = options | ({"key": jax.random.key(0)} if "key" in options else {})
    rules, beside, offset = read(x, x, x, options)
    assert find("gpu", (x, x, x), rules, beside, offset) == ("" if why else "cudnn", why)


def test_a_split_sequence_and_fewer_queries_run_in_plain_jax() -> None:
    rules, beside, offset = read(HALF, HALF, HALF, {})
    split = find("gpu", (HALF, HALF, HALF), rules, beside, offset, split=True)
    assert split == ("", "cuDNN's attention requires an unsharded sequence")
    fewer = find("gpu", (HALF, HALF, HALF), rules, beside, offset, lengths=(1, 1024))
    assert fewer == ("", "cuDNN's attention is used for as many queries as keys, but there are 1 and 1024")


CALL = """HloModule step

ENTRY %main (q: bf16[2,4,64,16]) -> (bf16[2,4,64,16], u8[0]) {{
  %q = bf16[2,4,64,16] parameter(0)
  ROOT %out = (bf16[2,4,64,16], u8[0]) custom-call(%q), custom_call_target="{target}", {metadata}
}}
"""


@pytest.mark.parametrize(
    ("target", "flops"),
    [("__cudnn$fmhaSoftmax", 2 * 7), ("__cudnn$fmhaScaleBiasSoftmaxBackward", 5 * 7)],
    ids=["forward", "backward"],
)
def test_an_audit_counts_the_matmuls_of_cudnn(target: str, flops: int) -> None:
    metadata = 'metadata={op_name="jit(step)/attention_matmul_flops_7/custom_call"}'
    module = parse(CALL.format(target=target, metadata=metadata))
    (call,) = [i for c in module.computations.values() for i in c.instructions.values() if i.opcode == "custom-call"]
    assert kernel_flops(call) == flops


def test_jax_exports_the_calls_for_absent_gpus() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).on("h100:8"), RULES)
    shapes = [jax.ShapeDtypeStruct((8, 64, 2, 64), jnp.bfloat16)] * 3
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in COMPILERS["gpu"].kernels]
    ids = np.zeros((8, 64), np.int32)
    with layout:
        loss = lambda *x: jnp.sum((jp.attention(*x) + jp.attention(*x, segment_ids=ids)).astype(jnp.float32))
        exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["cuda"], disabled_checks=checks)
        assert exported(*shapes).mlir_module().count("__cudnn$fmha") == 4
