"""The buffers alive at the peak, for programs written by hand and stored ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import few

from jaxpar.analysis.hlo.liveness import ON_CHIP, own_line, peak
from jaxpar.analysis.hlo.parser import Location, parse

CHAIN = """HloModule chain, is_scheduled=true

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0), metadata={op_name="params['w']"}
  %b = f32[512]{0} broadcast(%a), dimensions={0}, metadata={op_name="jit(step)/jvp()/mul"}
  %c = f32[1024]{0} broadcast(%b), dimensions={0}
  %d = f32[256]{0} slice(%c), slice={[0:256]}
  ROOT %e = f32[256]{0} add(%d, %a)
}
"""


def test_a_buffer_lives_until_its_last_reader() -> None:
    found = peak(parse(CHAIN))
    # While b is expanded to c, both are alive next to the argument; b is freed before d and e are made.
    assert found.bytes == 4 * (256 + 512 + 1024)
    assert [b.dims for b in found.buffers] == [(1024,), (512,), (256,)]
    assert [b.argument for b in found.buffers] == [False, False, True]
    assert found.buffers[2].number == 0 and found.buffers[2].op_name == "params['w']"
    # A buffer without a name takes the name of its operand.
    assert found.buffers[0].op_name == "jit(step)/jvp()/mul" and found.buffers[0].opcode == "broadcast"


def test_the_memory_on_the_chip_is_counted_apart() -> None:
    module = parse(
        CHAIN.replace("f32[512]{0}", "f32[512]{0:T(256)S(1)}").replace("%d = f32[256]{0}", "%d = f32[256]{0:S(1)}")
    )
    assert peak(module).bytes == 4 * (256 + 1024)
    assert peak(module, ON_CHIP).bytes == 4 * 512
    assert peak(parse(CHAIN), ON_CHIP).bytes == 0


IN_PLACE = """HloModule in_place, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} negate(%a)
  %c = f32[64]{0} slice(%a), slice={[0:64]}
  ROOT %e = (f32[256]{0}, f32[64]{0}) tuple(%b, %c)
}
"""


def test_a_result_in_the_place_of_a_donated_argument_needs_none_of_its_own() -> None:
    assert peak(parse(IN_PLACE)).bytes == 4 * (256 + 64)
    kept = IN_PLACE.replace(", input_output_alias={ {0}: (0, {}, may-alias) }", "")
    assert peak(parse(kept)).bytes == 4 * (256 + 64 + 256)


LOOP = """HloModule loop, is_scheduled=true

%body (p: s32[]) -> s32[] {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %big = f32[4096]{0} broadcast(%x), dimensions={0}
  %y = f32[256]{0} slice(%big), slice={[0:256]}
  ROOT %r = (s32[], f32[256]{0}) tuple(%i, %y)
}

%condition (p: s32[]) -> pred[] {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %n = s32[] constant(0)
  %t = (s32[], f32[256]{0}) tuple(%n, %a)
  %w = (s32[], f32[256]{0}) while(%t), condition=%condition, body=%body
  ROOT %o = f32[256]{0} get-tuple-element(%w), index=1
}
"""


def test_what_a_loop_makes_counts_once_and_says_where() -> None:
    found = peak(parse(LOOP))
    (large,) = [b for b in found.buffers if b.bytes == 4 * 4096]
    assert large.scope == "w"
    assert found.bytes == 4 * (256 + 4096 + 256)  # the argument, and both neighbours in the body


STACK = """HloModule stack, is_scheduled=true

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %s = f32[4096]{0} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="jit(f)/jit(step)"}
  %t = (f32[256]{0}, f32[4096]{0}) tuple(%a, %s)
  %w = (f32[256]{0}, f32[4096]{0}) opt-barrier(%t), metadata={op_name="jit(f)/jit(step)/jvp()/while"}
  ROOT %o = f32[256]{0} get-tuple-element(%w), index=0
}
"""


def test_memory_for_a_loop_to_fill_is_named_after_the_loop() -> None:
    (stack,) = [b for b in peak(parse(STACK)).buffers if b.bytes == 4 * 4096]
    assert stack.op_name == "jit(f)/jit(step)/jvp()/while"


PROGRAMS = ["tpu_fsdp", "tpu_fsdp_tp", "tpu_tp_sp", "tpu_unrolled", "gpu_fsdp", "gpu_tp_sp", "tpu_kernel", "tpu_nested"]


@pytest.mark.parametrize("name", few(PROGRAMS, 3))
def test_the_peak_is_never_less_than_the_arguments(name, stored_text):
    module = parse(stored_text(name))
    arguments = module[module.entry].parameters
    found = peak(module)
    assert found.bytes >= sum(a.bytes for p in arguments for a in p.types if not a.space)
    assert found.bytes == sum(b.bytes for b in found.buffers)
    assert [b.bytes for b in found.buffers] == sorted((b.bytes for b in found.buffers), reverse=True)
    assert sorted(b.number for b in found.buffers if b.argument) == [
        i for i, p in enumerate(arguments) if not p.types[0].space
    ]


@pytest.mark.parametrize("name", few(PROGRAMS, 3))
def test_no_buffer_is_put_down_to_a_library(name, stored_text):
    sources = {b.source for b in peak(parse(stored_text(name))).buffers} - {""}
    assert all("llama.py" in s or "losses.py" in s or "audit_programs.py" in s for s in sources), sources


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12))
def test_a_chain_has_two_neighbours_alive(sizes: list[int]) -> None:
    lines = [
        "HloModule chain, is_scheduled=true",
        "",
        "ENTRY %main (a: f32[1]) -> f32[1] {",
        f"  %v0 = f32[{sizes[0]}]{{0}} parameter(0)",
    ]
    lines += [f"  %v{i} = f32[{n}]{{0}} broadcast(%v{i - 1}), dimensions={{0}}" for i, n in enumerate(sizes[1:], 1)]
    lines[-1] = lines[-1].replace("  %", "  ROOT %", 1)
    found = peak(parse("\n".join([*lines, "}"])))
    pairs = [a + b for a, b in zip([0, *sizes[1:]], [*sizes[1:], 0], strict=True)]
    assert found.bytes == 4 * (sizes[0] + max(pairs))


def test_own_lines_are_the_models() -> None:
    frames = [
        Location("_scan", "/env/site-packages/jax/_src/loops.py", 1),
        Location("put", "/env/site-packages/jaxpar/sharding/arrays.py", 2),
        Location("compile_program", "jaxpar/analysis/compile/ahead_of_time.py", 3),
        Location("Attention.__call__", "jaxpar/models/llama/layers.py", 4),
    ]
    assert own_line(frames) == "Attention.__call__ (layers.py:4)"
    assert own_line(frames[:3]) == "" and own_line([]) == ""
    assert own_line([Location("run", "<frozen runpy>", 5)]) == ""
    assert own_line([Location("f", "C:\\work\\jaxpar\\examples\\mine.py", 6)]) == "f (mine.py:6)"
