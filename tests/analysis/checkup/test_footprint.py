"""Memory by category: exact figures, rules of thumb, and sums that match the totals."""

from __future__ import annotations

import jax
import optax
import pytest
from profiles import few
from stored import facts, held, step, text

import jaxpar as jp
from jaxpar.analysis.checkup.footprint import CATEGORIES, footprint, held_by
from jaxpar.analysis.hlo.liveness import Buffer, Peak, peak
from jaxpar.analysis.hlo.parser import parse
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.sharding.hardware.accelerators import accelerator

SIZES = {"data": 4, "model": 2}
WEIGHT = held("params/up", (3, 64, 32), ((), ("data",), ("model",)), 3 * 16 * 16 * 4)


def made(shape: str, op_name: str, **fields: object) -> Buffer:
    return Buffer(128, shape, "", op_name, str(fields.pop("scope", "")), False, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("buffer", "category"),
    [
        (made("f32[3,16,16]", "jit(step)/transpose(jvp())/while"), "gradients"),  # the shard of a gradient
        # one layer of a gradient
        (made("f32[64,16]", "jit(step)/transpose(jvp())/dot_general", scope="while.1"), "gradients"),
        # a gathered weight
        (made("f32[64,16]", "jit(step)/transpose(jvp())/dot", opcode="all-gather-start"), "temporaries"),
        (made("f32[3,16,16]", "jit(step)/mul"), "temporaries"),  # made by the optimizer
        (made("bf16[3,8,64]", "jit(step)/jvp()/while"), "activations"),
        (made("bf16[8,64]", "jit(step)/jvp()/while/body/dot_general", scope="while.1"), "temporaries"),
        (made("bf16[8,64]", "jit(step)/transpose(jvp())/checkpoint/rematted_computation/mul"), "temporaries"),
        (made("bf16[8,64]", ""), "temporaries"),
        (made("bf16[3,64,64]", "jit(step)/jvp()/while", gathered=True), "kept weights"),
    ],
)
def test_a_buffer_has_the_category_of_its_maker(buffer: Buffer, category: str) -> None:
    found = footprint(Peak(128, (buffer,)), (WEIGHT,), {"peak": 10_000}, SIZES, None)
    assert found.categories[category] == 128 and found.categories["parameters"] == WEIGHT.bytes
    assert sum(found.categories.values()) + found.unattributed == found.total == 10_000


@pytest.mark.parametrize(
    ("total", "on_chip", "rest"), [(10_000, 300, 9_700 - 128), (500, 300, 72), (400, 300, 0), (100, 300, -28)]
)
def test_the_compilers_peak_counts_the_memory_on_the_chip(total: int, on_chip: int, rest: int) -> None:
    found = footprint(Peak(128, (made("f32[8]", ""),), on_chip), (), {"peak": total}, SIZES, None)
    assert found.categories["temporaries"] == 128 and found.unattributed == rest
    assert found.categories["on-chip memory"] == total - 128 - rest
    assert footprint(Peak(128, (), on_chip), (), {}, SIZES, None).categories["on-chip memory"] == 0


@pytest.mark.parametrize("name", few(["tpu_fsdp", "tpu_fsdp_tp", "tpu_tp_sp", "tpu_unrolled", "tpu_kept"], 2))
def test_the_categories_of_a_program_add_up_to_the_walk(name: str) -> None:
    known = facts(name)
    config = LlamaConfig(**known["config"])
    rules = {"tpu_unrolled": "tp", "tpu_kept": "fsdp"}.get(name, name[4:])
    layout = jp.Layout(
        jp.MeshSpec(**{axis: n for axis, n in known["mesh"].items() if n > 1}).abstract(),
        jp.Layout.from_yaml(f"configs/layouts/{rules}.yaml", devices=64).rules,
    )
    placed = layout.sharding(("batch", "seq"), (known["batch"], known["seq"]))
    tokens = jax.ShapeDtypeStruct((known["batch"], known["seq"]), "int32", sharding=placed)
    state = jp.abstract_state(layout, make_llama(config), optax.sgd(1e-3))
    given = held_by(layout, state, {"tokens": tokens, "targets": tokens})
    walk = peak(parse(text(name)))
    found = footprint(walk, given, {}, known["mesh"], accelerator("v5e"))
    assert tuple(found.categories) == CATEGORIES and found.fits and found.over < 0
    arguments = sum(b.bytes for b in walk.buffers if b.argument)
    if name != "tpu_unrolled":  # its parameters are not stacked, so they differ from make_llama's
        # The random key is an argument, but the step may not read it.
        assert sum(h.bytes for h in given) == pytest.approx(arguments, abs=16)
        assert found.total == pytest.approx(walk.bytes, abs=16)
    made = sum(found.categories[name] for name in ("kept weights", "activations", "temporaries", "gradients"))
    assert made == sum(b.bytes for b in walk.buffers if not b.argument)
    # The forward pass gathers them in 16 bits and keeps them: all of the layers' matrices, and nothing else.
    kept = 2 * (config.matmul_params - config.embed * config.vocab) if name == "tpu_kept" else 0
    assert found.categories["kept weights"] == kept


def test_what_does_not_fit_says_by_how_much() -> None:
    found = footprint(Peak(0, ()), (), {"peak": 17 * 2**30, "host": 5}, {}, accelerator("v5e"))
    assert not found.fits and found.over == 2**30 and found.host == 5 and found.unattributed == 17 * 2**30
    assert step("tpu_fsdp").memory["host"] == 0
