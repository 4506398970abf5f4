"""cuDNN's attention for GPUs that are not attached: the custom calls that jax lowers its own function to.

``jax.nn.dot_product_attention(implementation="cudnn")`` looks for the library when it is traced, and for devices when
it is lowered. A program for absent GPUs can therefore not contain it. The calls themselves need neither, and XLA's
compiler for GPUs reads them. ``tests/parallel/attention/test_cudnn.py`` compares them with those of jax.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NAMES = {
    (forward, masked): f"__cudnn$fmha{'ScaleBias' if masked else ''}Softmax{'' if forward else 'Backward'}"
    for forward in (True, False)
    for masked in (True, False)
}
"""The target of a call: of the forward or the backward pass, without or with a mask."""
_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""What is added to a hidden score: the difference of two such numbers must be finite."""
_BY_HEAD = (0, 2, 1, 3)
"""[B, S, H, D] to [B, H, S, D] and back, and the order of the results' dims in memory."""
_ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}
# Contracted dim and batch dims of both operands of each matmul, on arrays [B, S, H, D] and scores [B, H, S, T].
_BY_TOKENS = (("3", "3"), (("0", "2"), ("0", "2")))
_SCORES_KEYS = (("3", "1"), (("0", "1"), ("0", "2")))
_SCORES_QUERIES = (("2", "1"), (("0", "1"), ("0", "2")))
_FORWARD = {"bmm1": _BY_TOKENS, "bmm2": _SCORES_KEYS}
_BACKWARD = {
    "bmm1_grad_gemm1": _SCORES_QUERIES,
    "bmm1_grad_gemm2": _SCORES_KEYS,
    "bmm2_grad_gemm1": _SCORES_QUERIES,
    "bmm2_grad_gemm2": _BY_TOKENS,
}


class Spec(NamedTuple):
    """The static options of a call: scale, whether it is causal, and tokens of a window, 0 for none."""

    scale: float
    causal: bool
    window: int


def dot_product_attention(
    q_BSHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    *,
    mask: jax.Array | None,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None = None,
) -> jax.Array:
    """Returns what ``jax.nn.dot_product_attention(implementation="cudnn")`` returns, as a program that cannot run here.

    Args:
      q_BSHD: queries ``[batch, seq, heads, head_dim]`` in float16 or bfloat16.
      k_BTKD, v_BTKD: keys and values ``[batch, keys, kv_heads, head_dim]``.
      mask: whether a query sees a key, ``[batch or 1, 1, seq, keys]``, or ``None``.
      scale: factor of the scores.
      is_causal: whether a query sees no later key.
      local_window_size: the earlier keys that a query sees, and 0; ``None`` for all.

    Returns:
      The result ``[batch, seq, heads, head_dim]``.
    """
    spec = Spec(scale, is_causal, 0 if local_window_size is None else local_window_size[0] + 1)
    bias = None if mask is None else jnp.where(mask, 0, _HIDDEN[q_BSHD.dtype.name]).astype(q_BSHD.dtype)
    return _attend(spec, q_BSHD, k_BTKD, v_BTKD, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _forward(spec, q, k, v, bias, statistics=False)[0]


def _with_residuals(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> Any:
    o, statistics = _forward(spec, q, k, v, bias, statistics=True)
    return o, (q, k, v, bias, statistics, o)


def _forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, *, statistics: bool
) -> list[jax.Array]:
    batch, seq, heads, width = q.shape
    results = [jax.ShapeDtypeStruct((batch, heads, seq, width), q.dtype)]
    results += [jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)] if statistics else []
    operands = [q, k, v] if bias is None else [q, k, v, bias]
    o, *others = _call(NAMES[True, bias is not None], results, operands, 1, _config(spec, q, k, _FORWARD))
    return [o.transpose(_BY_HEAD), *others]


def _gradients(spec: Spec, residuals: Any, do: jax.Array) -> Any:
    q, k, v, bias, statistics, o = residuals
    operands = [q, k, v, statistics, do, *([] if bias is None else [bias]), o]
    results = [jax.ShapeDtypeStruct(tuple(x.shape[dim] for dim in _BY_HEAD), x.dtype) for x in (q, k, v)]
    grads = _call(NAMES[False, bias is not None], results, operands, 3, _config(spec, q, k, _BACKWARD))
    return *(x.transpose(_BY_HEAD) for x in grads), None


_attend.defvjp(_with_residuals, _gradients)


def _call(name: str, results: list[Any], operands: list[jax.Array], by_head: int, config: str) -> list[jax.Array]:
    """Returns the results of a call, of which the first ``by_head`` are ``[B, H, S, D]`` with tokens before heads.

    The last result of the call itself, a workspace whose size the compiler fills in, is dropped.
    """
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    layouts = [_BY_HEAD if n < by_head else None for n in range(len(results) + 1)]
    call = jax.ffi.ffi_call(
        name,
        [*results, workspace],
        vmap_method="sequential",
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    return list(call(*operands))[:-1]


def _config(spec: Spec, q: jax.Array, k: jax.Array, matmuls: dict[str, Any]) -> str:
    """Returns the configuration of a call, in the form that XLA reads."""
    batch, seq, heads, _ = q.shape
    scores = {
        "element_type": _ELEMENTS[q.dtype.name],
        "dimensions": [str(n) for n in (batch, heads, seq, k.shape[1])],
        "tuple_shapes": [],
        "layout": _layout(),
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": spec.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if spec.causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": spec.window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    attention |= {f"{name}_dot_dimension_numbers": _numbers(*dims) for name, dims in matmuls.items()}
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


def _layout() -> dict[str, Any]:
    """Returns the layout of the scores: rows of keys, without tiles."""
    return {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }


def _numbers(contracted: tuple[str, str], batches: tuple[tuple[str, str], tuple[str, str]]) -> dict[str, Any]:
    return {
        "lhs_contracting_dimensions": [contracted[0]],
        "rhs_contracting_dimensions": [contracted[1]],
        "lhs_batch_dimensions": list(batches[0]),
        "rhs_batch_dimensions": list(batches[1]),
    }
