"""FLOPs and bytes of main memory, weighted by trip counts, against formulas by hand, for CPU, TPU and GPU programs."""

from __future__ import annotations

import math

import audit_programs as programs
import jax
import jax.numpy as jnp
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.analysis.hlo.flops import matmul_flops
from jaxpar.analysis.hlo.parser import parse
from jaxpar.models.llama import Llama, LlamaConfig

SMALL = {"vocab": 208, "embed": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96}
FOUR_DIGITS = 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "remat"),
    few(
        [
            (Llama, "none"),
            (Llama, "full"),
            (Llama, "dots"),
            (programs.UnrolledLlama, "none"),
            (programs.UnrolledLlama, "full"),
        ],
        1,
        names=2,
    ),
)
def test_a_llama_compiled_here_has_the_flops_of_the_formula(model, remat):
    config = LlamaConfig(**SMALL, remat=remat)
    layout = programs.layout_on("fsdp_tp", None, data=4, model=2)
    report = jp.audit(programs.llama_step(layout, config, 8, 32, model).compile(), mesh=layout.mesh)
    assert report.certain
    assert report.matmul_flops * 8 == pytest.approx(programs.training_flops(config, 8, 32), rel=FOUR_DIGITS)


@pytest.mark.parametrize("name", ["tpu_fsdp", "tpu_fsdp_tp", "tpu_tp_sp", "tpu_unrolled", "gpu_fsdp", "gpu_tp_sp"])
def test_a_llama_compiled_for_an_accelerator_has_the_flops_of_the_formula(name, stored, facts):
    known, report = facts(name), stored(name)
    config = LlamaConfig(**known["config"])
    whole = report.matmul_flops * math.prod(known["mesh"].values())
    assert report.certain
    assert whole == pytest.approx(programs.training_flops(config, known["batch"], known["seq"]), rel=FOUR_DIGITS)


def test_a_llama_on_two_slices_has_the_flops_of_the_formula(stored, facts):
    """The splash kernel computes attention and counts separately."""
    known, report = facts("tpu_slices_fsdp"), stored("tpu_slices_fsdp")
    config, batch, seq = LlamaConfig(**known["config"]), known["batch"], known["seq"]
    scores = 4 * 2 * 2 * batch * seq * seq * config.heads * config.head_dim * config.layers
    assert report.matmul_flops * 8 == pytest.approx(
        programs.training_flops(config, batch, seq) - scores, rel=FOUR_DIGITS
    )
    assert report.kernel_flops and not report.silent_kernels


def test_the_remat_policies_differ_by_more_than_the_tolerance():
    flops = {
        remat: programs.training_flops(LlamaConfig(**SMALL, remat=remat), 8, 32) for remat in ("none", "dots", "full")
    }
    whole_block_again = flops["full"] + 3 * 2 * 8 * 32 * SMALL["embed"] * SMALL["mlp"]
    assert len({*flops.values(), whole_block_again}) == 4
    assert min(flops["dots"] / flops["none"], whole_block_again / flops["full"]) > 1 + 100 * FOUR_DIGITS


def test_weights_gathered_in_a_shard_map(stored, facts):
    known = facts("tpu_gathered_by_hand")
    one = 2 * known["tokens"] // 16 * known["embed"] * known["mlp"]
    # The forward pass has two matmuls, the backward pass four, and the recomputed layer only the first.
    assert stored("tpu_gathered_by_hand").matmul_flops == 7 * one * known["layers"]


def test_matmuls_of_a_gpu_library_count(stored, stored_text, facts):
    known = facts("gpu_library_matmuls")
    text = stored_text("gpu_library_matmuls")
    assert "__cublas$lt$matmul" in text and " dot(" not in text
    one = 2 * known["size"] * known["size"] * 2 * known["size"] // 8
    # The input of the first layer needs no gradient, but is computed nevertheless: all layers of a scan run the same
    # program.
    assert stored("gpu_library_matmuls").matmul_flops == 6 * one * known["layers"]


def test_kernels_count_what_they_state_once_a_trip(stored, facts):
    known = facts("tpu_kernel")
    assert stored("tpu_kernel").kernel_flops == known["flops"] * known["length"]
    assert stored("tpu_kernel").silent_kernels == ()


def test_a_kernel_that_states_nothing_is_named(stored):
    report = stored("tpu_silent_kernel")
    assert report.kernel_flops == 0
    assert report.silent_kernels == ("tpu_custom_call",)
    assert "excluding the FLOPs of tpu_custom_call, which report none" in report.headline()


def test_one_device_without_a_mesh():
    report = jp.audit(jax.jit(jnp.dot).lower(jnp.ones((8, 32)), jnp.ones((32, 16))).compile())
    assert report.mesh == {"devices": 1}
    assert report.matmul_flops == 2 * 8 * 32 * 16
    assert report.collectives == ()


@pytest.mark.parametrize(
    ("stride", "padding", "lhs_dilation", "rhs_dilation"),
    [(1, (0, 0), 1, 1), (2, (1, 2), 1, 1), (1, (2, 2), 2, 1), (2, (3, 3), 1, 2), (3, (4, 1), 2, 2)],
)
def test_a_convolution_counts_the_taps_that_meet_data(stride, padding, lhs_dilation, rhs_dilation):
    size, kernel, features, channels, batch = 11, 3, 5, 4, 2
    convolve = jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (stride,), [padding], (lhs_dilation,), (rhs_dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )
    )
    x, w = jnp.ones((batch, size, channels)), jnp.ones((kernel, channels, features))
    # A convolution of ones in one channel: each output is the number of taps that met an input.
    taps = float(convolve(x[:1, :, :1], w[:, :1, :1]).sum())
    module = parse(convolve.lower(x, w).compile().as_text())
    found = [matmul_flops(i, where) for where in module.computations.values() for i in where]
    assert sum(found) == 2 * batch * features * channels * taps


def test_memory_traffic_of_a_matmul_is_its_operands_and_its_result():
    report = jp.audit(jax.jit(jnp.dot).lower(jnp.ones((256, 512)), jnp.ones((512, 128))).compile())
    assert report.hbm_bytes == 4 * (256 * 512 + 512 * 128 + 256 * 128)


def test_a_scan_reads_one_layer_of_the_stack_at_a_time():
    layers, size = 16, 128

    def run(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    lowered = jax.jit(run).lower(jnp.ones((8, size)), jnp.ones((layers, size, size)))
    stack = 4 * layers * size * size
    # The stack itself, and once more for a compiler that copies a layer before it multiplies.
    assert stack <= jp.audit(lowered.compile()).hbm_bytes <= 3.3 * stack


_TILE = """HloModule tile, is_scheduled=true

%take (b: f32[64,128], j: s32[]) -> f32[1,128] {
  %b = f32[64,128]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %none = s32[] constant(0)
  ROOT %row = f32[1,128]{1,0} dynamic-slice(%b, %j, %none), dynamic_slice_sizes={1,128}
}

%add_one (a: f32[64,128], i: s32[], c: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %c = f32[64,128]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,128]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,128}
  %new = f32[1,128]{1,0} fusion(%c, %i), kind=kLoop, calls=%take
  %sum = f32[1,128]{1,0} add(%old, %new)
  ROOT %put = f32[64,128]{1,0} dynamic-update-slice(%a, %sum, %i, %zero)
}

ENTRY %main (x: f32[64,128], n: s32[], y: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %y = f32[64,128]{1,0} parameter(2)
  ROOT %out = f32[64,128]{1,0} fusion(%x, %n, %y), kind=kLoop, calls=%add_one
}
"""


def test_a_tile_added_in_place_costs_a_tile():
    """The tile is read from a large array in the fusion that writes it back, or sliced by a nested fusion."""
    row, offset = 128 * 4, 4
    assert jp.audit(_TILE).hbm_bytes == 3 * row + offset


def test_a_slice_reads_what_it_takes():
    def slice_rows(x, i):
        return jax.lax.dynamic_slice(x, (i, jnp.uint32(0)), (4, 256))

    text = jax.jit(slice_rows).lower(jnp.ones((1024, 256)), jnp.uint32(3)).compile().as_text()
    offsets = 2 * 4
    assert jp.audit(text).hbm_bytes == 2 * 4 * 256 * 4 + offsets


_NESTED = """HloModule nested, is_scheduled=true

%view (a: bf16[16,128]) -> bf16[1,16,128] {
  %a = bf16[16,128]{1,0} parameter(0)
  ROOT %b = bf16[1,16,128]{2,1,0} bitcast(%a)
}

%tiles (c: bf16[64,128]) -> bf16[64,128] {
  %c = bf16[64,128]{1,0:T(16,128)(2,1)} parameter(0)
  ROOT %d = bf16[64,128]{1,0:T(8,128)(2,1)} copy(%c)
}

%multiply (x: bf16[16,128], w: bf16[128,128], stack: bf16[64,128], i: s32[]) -> (f32[1,16,128], bf16[64,128]) {
  %x = bf16[16,128]{1,0} parameter(0)
  %w = bf16[128,128]{1,0} parameter(1)
  %stack = bf16[64,128]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %seen = bf16[1,16,128]{2,1,0} fusion(%x), kind=kLoop, calls=%view
  %kept = bf16[64,128]{1,0} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiles
  %zero = s32[] constant(0)
  %row = bf16[1,128]{1,0} slice(%w), slice={[0:1], [0:128]}
  %put = bf16[64,128]{1,0} dynamic-update-slice(%kept, %row, %i, %zero)
  %wide = f32[128,128]{1,0} convert(%w)
  %one = f32[1,128]{1,0} dynamic-slice(%wide, %i, %zero), dynamic_slice_sizes={1,128}
  %out = f32[1,16,128]{2,1,0} dot(%seen, %one), lhs_contracting_dims={2}, rhs_contracting_dims={1}
  ROOT %both = (f32[1,16,128]{2,1,0}, bf16[64,128]{1,0}) tuple(%out, %put)
}

ENTRY %main (x: bf16[16,128], w: bf16[128,128], stack: bf16[64,128], i: s32[]) -> (f32[1,16,128], bf16[64,128]) {
  %x = bf16[16,128]{1,0} parameter(0)
  %w = bf16[128,128]{1,0} parameter(1)
  %stack = bf16[64,128]{1,0} parameter(2)
  %i = s32[] parameter(3)
  ROOT %run = (f32[1,16,128]{2,1,0}, bf16[64,128]{1,0}) fusion(%x, %w, %stack, %i), kind=kOutput, calls=%multiply
}
"""


def test_a_view_in_a_nested_fusion_is_read_by_those_who_use_it() -> None:
    """A matmul reads all of it, an update in place none of it, and a slice of a converted array its own elements."""
    row = 2 * 128
    operand, taken, offset, written = 16 * row, 2 * row, 4, 4 * 16 * 128 + row
    assert jp.audit(_NESTED).hbm_bytes == operand + taken + offset + written
