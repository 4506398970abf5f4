"""``jp.attention`` and ``jp.context.attention_local`` with every mask, option and mesh, against fp64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import reference
from .attention_inputs import DTYPES, arrays_of, problem_of
from .cases import Dice, Differences, InvalidCase

# The rounding unit of each dtype times a factor for the computation: sums of up to 40 terms, scores of up to 30 (their
# rounding is that of the weights' exponents), and for 16 bits three roundings (weights, gradients of scores, the result
# and values computed from it). The products are 2^-24 * 160, 2^-53 * 90,000 (precise enough to detect a missing term),
# 2^-9 * 10 and 2^-11 * 10.
BOUNDS = {"float32": 1e-5, "float64": 1e-11, "bfloat16": 2e-2, "float16": 5e-3}
LABELS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
AXES = ("data", "context", "ulysses", "model")


@dataclass(frozen=True)
class Case:
    """An attention call; the defaults are one query, one key and no options.

    Attributes:
      form: ``global`` is jp.attention, ``local`` jp.context.attention_local in a shard_map, ``manual`` jp.attention in
        a shard_map over data.
      data, context, ulysses, model: sizes of the mesh.
      batch, heads: sequences per device of data, and query heads per key head.
      causal: ``None`` omits the argument; then a query sees no later key except through a prefix.
      prefix: one number in the mask, or a tuple with one number per sequence, passed as an option.
      where: hides keys by a function of positions.
      segments: ``packed``, ``padding`` or ``wide`` ids; ``holes`` puts NaN into padding.
      bias: ``finite``, ``inf`` (some -inf), ``min`` (some of the dtype's smallest number), ``inf rows`` or ``min
        rows`` (full rows of these).
      order: the token order of a ring; ``given`` and ``traced`` are permutations.
    """

    impl: str = "dense"
    form: str = "global"
    data: int = 1
    context: int = 1
    ulysses: int = 1
    model: int = 1
    batch: int = 1
    queries: int = 1
    keys: int = 1
    kv_heads: int = 1
    heads: int = 1
    head_dim: int = 1
    value_dim: int = 1
    dtype: str = "float32"
    causal: bool | None = True
    window: int | tuple[int | None, int | None] | None = None
    prefix: int | tuple[int, ...] | None = None
    chunk: int | None = None
    where: bool = False
    q_offset: int | None = None
    traced_offset: bool = False
    segments: str | None = None
    holes: bool = False
    bias: str | None = None
    bias_batch: bool = False
    bias_heads: bool = False
    sinks: bool = False
    softcap: float | None = None
    alibi: str | None = None
    scale: float | None = None
    dropout: float = 0.0
    order: str | None = None
    kv_grad_dtype: str | None = None
    keep_gathered_kv: bool = False
    block: int | None = None
    pad: bool = False
    seed: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def rows(self) -> int:
        return self.batch * self.data

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.heads


def draw(dice: Dice) -> Case:
    """Draw a case; nearly all are valid, but sometimes sizes that do not divide are drawn without ``pad``."""
    form = dice.one("global", "global", "global", "local", "manual")
    data, context, ulysses, model = dice.one(*_meshes(form))
    split = context * ulysses
    impls = ["dense", "flash", "auto"] if split == 1 else ["ring", "gather", "ulysses", "ring_self_attention", "auto"]
    impls += ["hybrid"] if min(context, ulysses) > 1 else []
    impls += ["split_kv"] if split > 1 else []
    if form != "global":
        impls = [impl for impl in impls if impl not in ("dense", "auto") or form == "manual"]
    impl = dice.one(*impls)
    apart = {"ulysses": split, "hybrid": ulysses, "auto": split}.get(impl, 1)
    kv_heads = dice.one(1, 1, 2, 3) * model
    heads = dice.whole(1, 2)
    while kv_heads * heads % (apart * model):
        heads += 1
    lengths = _lengths(dice, impl, split, form)
    values = {"form": form, "data": data, "context": context, "ulysses": ulysses, "model": model, "impl": impl}
    values |= {"kv_heads": kv_heads, "heads": heads, "batch": dice.one(1, 1, 2, 3), "seed": dice.whole(0, 999)}
    values |= {"head_dim": dice.one(1, 2, 3, 4, 5, 8), "value_dim": dice.one(1, 2, 4, 7)}
    if dice.chance(0.6):
        values["value_dim"] = values["head_dim"]
    values |= lengths | _mask(dice, values | lengths)
    return Case(**values, **_options(dice, values))


def _meshes(form: str) -> list[tuple[int, int, int, int]]:
    """Sizes of data, context, ulysses and model."""
    if form == "local":
        return [
            (1, 2, 1, 1),
            (1, 4, 1, 1),
            (2, 2, 1, 1),
            (1, 1, 2, 1),
            (2, 2, 2, 1),
            (1, 2, 2, 1),
            (1, 3, 1, 1),
            (4, 2, 1, 1),
        ]
    if form == "manual":
        return [(2, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)]
    whole = [(1, 1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2)]
    split = [
        (1, 2, 1, 1),
        (1, 4, 1, 1),
        (2, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 2, 2, 1),
        (1, 2, 1, 2),
        (1, 3, 1, 1),
        (2, 2, 2, 1),
    ]
    return whole + split


def _lengths(dice: Dice, impl: str, split: int, form: str) -> dict[str, Any]:
    """Draw the numbers of queries and keys, and whether they are padded to the multiple that the layout requires."""
    pad = form != "local" and dice.chance(0.5)
    # A zigzag ring takes two pieces per device. Sometimes a size that does not divide is drawn; the library refuses it.
    unit = 1 if pad or (form != "local" and dice.chance(0.03)) else 2 * split if split > 1 else 1
    most = 13 if unit == 1 else max(1, 12 // unit)
    keys = unit * dice.whole(1, most)
    queries = keys if dice.chance(0.6) else unit * dice.whole(1, most)
    if impl == "split_kv":
        queries = dice.one(1, 1, 2, 3, keys)
    return {"queries": queries, "keys": keys, "pad": pad}


def _mask(dice: Dice, so_far: dict[str, Any]) -> dict[str, Any]:
    """Draw the mask, positions and segments."""
    queries, keys, rows = so_far["queries"], so_far["keys"], so_far["batch"] * so_far["data"]
    far = lambda: dice.one(2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**40)
    values: dict[str, Any] = {"causal": dice.one(True, True, True, False, False, None)}
    if dice.chance(0.35):
        values["window"] = far() if dice.chance(0.08) else dice.whole(1, keys + 1)
        if values["causal"] is not None and dice.chance(0.4):
            values["window"] = (dice.maybe(0.7, *range(keys)), dice.maybe(0.7, *range(keys)))
    if dice.chance(0.2):
        each = tuple(dice.whole(0, keys) for _ in range(rows))
        values["prefix"] = each if dice.chance(0.4) else far() if dice.chance(0.08) else dice.whole(0, keys + 1)
    if dice.chance(0.15):
        values["chunk"] = dice.whole(1, keys + 1)
    if values["causal"] is not None and dice.chance(0.15):
        values["where"] = True
    if queries != keys or dice.chance(0.35):
        values["q_offset"] = dice.whole(-queries - 1, keys + 1) if dice.chance(0.7) else keys - queries
        values["traced_offset"] = dice.chance(0.4)
    if dice.chance(0.35):
        # jax truncates 64-bit arguments of the user's shard_map to 32 bits before attention receives them.
        last = "wide" if so_far["form"] == "global" else "packed"
        values["segments"] = dice.one("packed", "packed", "padding", "padding", last)
        values["holes"] = values["segments"] == "padding" and dice.chance(0.5)
    return values


def _options(dice: Dice, so_far: dict[str, Any]) -> dict[str, Any]:
    """Draw the options that change scores, weights and communication."""
    # XLA:CPU aborts on a 16-bit sum inside a shard_map with automatic axes, such as the user's shard_map here.
    narrow = () if so_far["form"] == "manual" else ("bfloat16", "float16")
    values: dict[str, Any] = {"dtype": dice.one(*["float32"] * 5, *narrow, "float64", "float64")}
    # In fp16 only -inf lies below the threshold that hides a key.
    least = "inf" if values["dtype"] == "float16" else "min"
    if dice.chance(0.25):
        kinds = ("finite", "finite", "inf", least, "inf rows", f"{least} rows")
        values["bias"] = dice.one(*kinds)
        values |= {"bias_batch": dice.chance(0.4), "bias_heads": dice.chance(0.5)}
    values |= {"sinks": dice.chance(0.15), "softcap": dice.maybe(0.15, 0.7, 2.0, 30.0)}
    values |= {"alibi": dice.maybe(0.15, "standard", "drawn"), "scale": dice.maybe(0.2, 0.3, 1.0)}
    values |= {"dropout": dice.maybe(0.2, 0.1, 0.5, 0.9) or 0.0, "block": dice.maybe(0.6, 1, 2, 3, 4, 5, 8, 16)}
    impl, split = so_far["impl"], so_far["context"] * so_far["ulysses"]
    ring = split > 1 and impl in ("ring", "ring_self_attention", "hybrid") and so_far["context"] > 1
    alike = so_far["queries"] == so_far["keys"]
    if ring and not so_far["pad"] and dice.chance(0.4):
        values["order"] = dice.one("contiguous", "zigzag", "striped", *(("given", "traced") if alike else ()))
    if ring and values["dtype"] in ("float32", "bfloat16"):
        values["kv_grad_dtype"] = dice.maybe(0.15, "float32", "bfloat16")
    values["keep_gathered_kv"] = impl == "gather" and dice.chance(0.3)
    return values


def run(case: Case) -> Differences:
    """Compare the result and all gradients of one attention call, compiled once, with the reference."""
    import jax

    if min(case.rows, case.queries, case.keys, case.query_heads, case.head_dim, case.value_dim) < 1:
        raise InvalidCase("a size is below 1")
    with jax.enable_x64(case.dtype == "float64"):
        return _compared(case)


def _compared(case: Case) -> Differences:
    from .attention_calls import found_by, kept_by_one_device

    arrays = arrays_of(case)
    keep = kept_by_one_device(case) if case.dropout else None
    problem = problem_of(case, arrays, keep)
    want = reference.solve(problem)
    found = found_by(case, arrays)
    differences = Differences()
    bound, label = BOUNDS[case.dtype], LABELS[case.dtype]
    if case.kv_grad_dtype == "bfloat16" and case.dtype == "float32":
        label = "bf16"  # gradients of keys and values are rounded once per hop
    for name in found:
        array = want.arrays[name]
        limit = BOUNDS["bfloat16"] if label == "bf16" else bound
        differences.check(name, found[name], array, limit, want.sizes[name], label)
    dtype = DTYPES[case.dtype]
    differences.claim(found["o"].dtype == dtype, f"the result is {found['o'].dtype}, but queries are {case.dtype}")
    return differences
