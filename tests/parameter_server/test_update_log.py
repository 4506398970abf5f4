"""The log of a server, cut off at every byte and damaged at every byte."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import DamagedError
from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.quantized_deltas import dequantize, quantize
from jaxpar.parameter_server.update_log import LogRecord, UpdateLog, encode

RECORDS = [
    LogRecord("update", {"clocks": [["w[0:2]", [[0, 1]]]]}, {"grad0": np.arange(6, dtype=np.float32).reshape(2, 3)}),
    LogRecord("hold"),
    LogRecord("adopt", {"n": 1}, {"a": np.asarray(jnp.ones((2,), jnp.bfloat16)), "s": np.float32(3).reshape(())}),
]


def _write(folder: Path, records: list[LogRecord] = RECORDS) -> bytes:
    log = UpdateLog(folder)
    assert list(log.records()) == []
    for record in records:
        log.append(record)
    log.close()
    return log.path.read_bytes()


def _read(folder: Path) -> list[tuple[str, dict[str, object]]]:
    log = UpdateLog(folder)
    found = [(r.kind, {n: (x.dtype.name, x.tolist()) for n, x in r.arrays.items()}) for r in log.records()]
    log.append(LogRecord("more"))  # a log that was cut off can be appended to
    log.close()
    return found


def test_records_come_back_with_their_dtypes(tmp_path: Path) -> None:
    _write(tmp_path)
    kinds = _read(tmp_path)
    assert [kind for kind, _ in kinds] == ["update", "hold", "adopt"]
    assert kinds[0][1] == {"grad0": ("float32", [[0, 1, 2], [3, 4, 5]])}
    assert kinds[2][1] == {"a": ("bfloat16", [1, 1]), "s": ("float32", 3)}


def test_of_two_logs_that_a_kill_leaves_the_newer_is_read(tmp_path: Path) -> None:
    """The old log is deleted after the new one has its name; a log without its name is not read."""
    old = _write(tmp_path)
    log = UpdateLog(tmp_path)
    assert len(list(log.records())) == 3
    log.replace([LogRecord("snapshot")])
    log.close()
    (tmp_path / "log-000000").write_bytes(old)
    (tmp_path / "log-000002.new").write_bytes(old)
    assert [kind for kind, _ in _read(tmp_path)] == ["snapshot"]
    assert not (tmp_path / "log-000000").exists()
    assert [kind for kind, _ in _read(tmp_path)] == ["snapshot", "more"]


def test_what_a_kill_cuts_off_is_forgotten_at_every_byte(tmp_path: Path) -> None:
    data = _write(tmp_path)
    edges = [0]
    for record in RECORDS:
        edges.append(edges[-1] + len(encode(record)))
    for size in range(0, len(data), 3):
        for rest in (b"", bytes(len(data) - size)):  # the file had grown, but the data was not written
            (tmp_path / "log-000000").write_bytes(data[:size] + rest)
            whole = sum(edge <= size for edge in edges[1:])
            if rest and size not in edges and size + data[size:].count(0) >= len(data):
                continue  # the record ends in zeros, so it is whole
            found = [kind for kind, _ in _read(tmp_path)]
            assert found == [r.kind for r in RECORDS[:whole]], size
            assert [kind for kind, _ in _read(tmp_path)] == [*found, "more"]


def test_a_flipped_bit_is_found_unless_nothing_follows(tmp_path: Path) -> None:
    data = _write(tmp_path)
    last = len(data) - len(encode(RECORDS[-1]))
    file = tmp_path / "log-000000"
    for at in range(last):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with raises(DamagedError, "/log-000000"):
            _read(tmp_path)
    file.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    with raises(DamagedError, "/log-000000", "byte 0"):
        _read(tmp_path)


def test_a_snapshot_replaces_the_log(tmp_path: Path) -> None:
    _write(tmp_path)
    log = UpdateLog(tmp_path)
    assert len(list(log.records())) == 3
    log.replace(RECORDS[2:])
    log.append(RECORDS[1])
    log.close()
    (tmp_path / "log-000007.new").write_bytes(b"left by a kill")
    assert [kind for kind, _ in _read(tmp_path)] == ["adopt", "hold"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log-000001", "log-000007.new"]


@given(st.lists(st.integers(0, 40), max_size=3), st.integers(0, 2**31), st.sampled_from([8, 4]))
def test_eight_and_four_bits_are_within_half_a_step(shape: list[int], seed: int, bits: DeltaBits) -> None:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    delta = quantize(x, bits)
    found = dequantize(delta)
    assert found.shape == x.shape and found.dtype == np.float32
    step = np.repeat(delta.scales, 256)[: x.size].reshape(x.shape)
    assert (np.abs(found - x) <= 0.5001 * step).all()
    assert delta.nbytes <= (x.size + 255) * bits / 8 + 1 + 4 * (x.size // 256 + 1)
