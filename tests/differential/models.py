"""Small Flax models under random layouts, ZeRO stages, microbatches and precisions, against plain jax in fp64 on one
device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import Dice, Differences, InvalidCase

# A parameter and the loss are up to 15 layers of operations apart, with sums of up to 4,096 terms: 2^-24 * 170. In 16
# bits each layer rounds weights, activations and their gradients; half as many roundings of one sign as layers give
# 2^-9 * 50 and 2^-11 * 50.
BOUNDS = {None: 1e-5, "bf16": 1e-1, "fp16": 2.5e-2}
SKIPPED = 65504 / 8
"""A scaled gradient below this leaves fp16 room for intermediate sums, so the step must not be skipped."""
CONDITIONED = 4
"""Where plain jax in fp32 is far from fp64, a layout may differ by this multiple of that distance."""
INFINITE = float("inf")
NORMED = 16
"""The least number of tokens of a batch norm: of two numbers it keeps only the signs, so their gradients are pure
rounding."""


@dataclass(frozen=True)
class Case:
    """A model and its step; the defaults are one dense layer of one number.

    Attributes:
      flavour: ``nnx`` or ``linen``.
      body: names of layers, in order; ``stack`` is a scan over two blocks of dense layers with stacked parameters.
      tokens: whether the input is tokens, with a loss over a vocabulary; otherwise it is rows of numbers, with a
        mean square.
      loss: for tokens, ``plain`` computes cross entropy by hand; ``cross_entropy`` and ``linear`` are the
        library's.
      mean: ``all``; ``masked`` divides by the number of tokens that count, at least 1; ``bare`` divides by that
        number, which may be 0 in a part.
      dropout: uses the step's key; attention_dropout: uses a separate key, in ``attention``.
      init: ``drawn`` compares initial parameters too; ``centred`` and ``softmax`` are drawn and reduced over a dim.
      scale: the loss scale of fp16.
    """

    flavour: str = "nnx"
    body: tuple[str, ...] = ("dense",)
    tokens: bool = False
    tied: bool = False
    loss: str = "plain"
    mean: str = "all"
    rows: int = 1
    seq: int = 1
    embed: int = 1
    heads: int = 1
    kv_heads: int = 1
    vocab: int = 2
    dropout: bool = False
    attention_dropout: bool = False
    data: int = 1
    context: int = 1
    model: int = 1
    sharded: bool = False
    zero: int = 0
    microbatches: int = 1
    precision: str | None = None
    scale: int = 16
    init: str | None = None
    uneven: int = 0
    seed: int = 0

    @property
    def batch(self) -> int:
        return self.rows * self.data * self.microbatches + self.uneven

    @property
    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "context": self.context, "model": self.model}

    @property
    def own_keys(self) -> bool:
        """Whether devices and microbatches draw from separate keys, so that results differ by design.

        docs/reference/randomness.md says where they do.
        """
        return self.dropout and (self.zero == 1 or self.microbatches > 1)


def draw(dice: Dice) -> Case:
    """Draw a model that fits its layout; sometimes the batch does not divide."""
    data, context, model = dice.one(
        *[(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 1, 2), (4, 1, 2), (1, 1, 2), (1, 2, 1), (2, 2, 2)]
    )
    values: dict[str, Any] = {"data": data, "context": context, "model": model, "flavour": dice.one("nnx", "linen")}
    values |= {"zero": dice.one(0, 0, 1, 1, 2, 3) if data > 1 else 0, "microbatches": dice.one(1, 1, 1, 2, 3)}
    values |= {"sharded": values["zero"] == 0 and dice.chance(0.4), "tokens": dice.chance(0.6)}
    # The mean of losses that are means over parts is that of the full batch; statistics of a part differ from those of
    # the batch.
    parts = values["zero"] == 1 or values["microbatches"] > 1
    if (
        parts and min(data, context, model) > 1
    ):  # XLA:CPU aborts on the lookup in a small table that is sharded next to manual axes
        values["tokens"] = False
    # Of two features a norm keeps only the signs, so their gradients are pure rounding; embed is therefore 4 or more.
    names = ["dense", "dense", "norm", "attention", "attention", "stack"]
    names += [] if context > 1 else ["flax attention", "conv"]
    names += [] if parts or context > 1 else ["batch norm"]
    values["body"] = tuple(dice.one(*names) for _ in range(dice.whole(1, 4)))
    values |= {"kv_heads": model * dice.one(1, 1, 2), "embed": dice.one(4, 8) * (-(-model * data // 4))}
    values |= {"heads": values["kv_heads"] * dice.one(1, 2), "rows": dice.one(1, 2)}
    values |= {"seq": 2 * context * dice.whole(1, 3), "vocab": 2 * model * data * dice.whole(1, 5)}
    if "batch norm" in values["body"]:
        values["seq"] = max(values["seq"], NORMED)
    values |= {"dropout": dice.chance(0.2), "attention_dropout": "attention" in values["body"] and dice.chance(0.4)}
    values |= {"mean": dice.one("all", "all", "masked", "masked", "bare"), "seed": dice.whole(0, 999)}
    values |= {"init": dice.maybe(0.2, "drawn", "centred", "softmax")}
    if values["tokens"]:
        values |= {"tied": dice.chance(0.3), "loss": dice.one("plain", "cross_entropy", "linear", "linear")}
    if dice.chance(0.3):
        values |= _narrow(dice, values)
    if values["zero"] != 1 and values["microbatches"] == 1 and data > 1 and dice.chance(0.04):
        values |= {"uneven": 1, "context": 1, "tokens": False, "loss": "plain", "tied": False}
        values |= {"body": ("dense",)}
    values["attention_dropout"] &= "attention" in values["body"]
    return Case(**values)


def _narrow(dice: Dice, so_far: dict[str, Any]) -> dict[str, Any]:
    """Draw the options of 16 bits; half of these cases have many words and tokens, so their gradients are small."""
    values: dict[str, Any] = {"precision": dice.one("bf16", "fp16"), "scale": 2 ** dice.one(0, 4, 8, 12, 16)}
    values["body"] = so_far["body"][:2]  # depth adds roundings, but tests nothing that two layers do not
    if values["precision"] == "fp16":  # CPUs lack an fp16 product that Flax's attention requires
        values["body"] = tuple("dense" if name == "flax attention" else name for name in values["body"])
    if so_far["tokens"] and dice.chance(0.5):
        values |= {"vocab": 16 * 2 ** dice.whole(3, 7), "seq": 16 * 2 ** dice.whole(0, 4), "rows": 2}
        values |= {"body": ("dense",)}
        if dice.chance(0.1):  # 1 / (words * tokens) is then below the smallest number of fp16
            values |= {"vocab": 2**14, "seq": 2**10, "rows": 4, "microbatches": 1, "scale": 2**8, "loss": "linear"}
            values["tied"] = (
                # the sum of a tied table's two gradients, of 4,096 tokens in bf16, exceeds the bound in plain jax too
                False
            )
            values |= {"data": 1, "context": 1, "model": 1, "zero": 0, "embed": 4, "heads": 1, "kv_heads": 1}
    return values


def run(case: Case) -> Differences:
    """Compare initial parameters if configured, then loss, gradients and statistics of one step, and check that it
    compiled once."""
    if (
        min(case.rows, case.seq, case.embed, case.heads, case.vocab, case.microbatches) < 1
        or case.heads % case.kv_heads
    ):
        raise InvalidCase("sizes that no model has")
    if case.attention_dropout and "attention" not in case.body:
        raise InvalidCase("there is no attention")
    if "batch norm" in case.body and (case.zero == 1 or case.microbatches > 1):
        raise InvalidCase("statistics of parts are not those of the batch")
    if "batch norm" in case.body and case.seq < NORMED:
        raise InvalidCase("statistics of a few tokens")
    if not case.tokens and (case.tied or case.loss != "plain"):
        raise InvalidCase("there is no vocabulary")
    import jax

    from . import model_steps

    differences = Differences()
    label = case.precision or "fp32"
    if case.init is not None:
        model_steps.check_initial(case, differences)
    found = model_steps.found(case, differences)
    differences.claim(
        case.batch % case.data == 0, f"{case.batch} rows over {case.data} devices are accepted, and each computes all"
    )
    if case.own_keys:
        differences.claim(bool(found.finite), f"the loss is {found.metrics['loss']}")
        return differences
    keep = model_steps.kept(case) if case.attention_dropout else None
    with jax.enable_x64(True):
        want = model_steps.reference(case, keep)
    bound = BOUNDS[case.precision]
    step = Differences()
    model_steps.compare(case, found, want, step, bound, label, SKIPPED)
    if step.wrong and case.precision is None:
        plain = Differences()  # the error of plain jax in fp32 on one device
        model_steps.compare(case, model_steps.reference(case, keep, exact=False), want, plain, INFINITE, label, SKIPPED)
        if plain.errors and plain.errors[label] > bound / CONDITIONED:
            step, bound = Differences(), CONDITIONED * plain.errors[label]
            model_steps.compare(case, found, want, step, bound, "fp32, ill-conditioned", SKIPPED)
    differences.wrong += step.wrong
    differences.errors |= step.errors
    return differences
