"""Numbers between files and shards: exactly the bytes of a process's own shards, in both directions."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exported_together
import jax
import numpy as np
import pytest
from interpreters import outputs_of, two_processes
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.interop import huggingface, transfer
from jaxpar.interop.safetensors import StoredTensor, create_files, lay_out, read_tensors
from jaxpar.interop.tensor_map import TensorRule
from jaxpar.interop.transfer import OpenFiles

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
RULE = TensorRule("q", "q", "(h d) e -> e h d")


def stored(folder: Path, values: np.ndarray) -> StoredTensor:
    (tensor,) = lay_out(folder, {"q": ("F32", values.shape)}, 10**9).values()
    create_files([tensor])
    with tensor.file.open("r+b") as f:
        f.seek(tensor.start)
        f.write(values.tobytes())
    return tensor


@pytest.mark.parametrize(
    ("boxes", "count"),
    [
        ([((0, 64), (0, 4), (0, 8))], 2048),  # all
        ([((16, 32), (0, 4), (0, 8))], 512),  # a part of embed: short runs of 64 bytes
        ([((0, 64), (1, 2), (0, 8))], 512),  # a head: one run
        ([((0, 64), (0, 1), (0, 8)), ((0, 64), (3, 4), (0, 8))], 1024),  # two heads that are apart
        ([((0, 16), (0, 4), (0, 8)), ((16, 32), (0, 4), (0, 8))], 1024),  # two parts side by side
        ([((0, 16), (0, 2), (0, 8))] * 2, 256),  # the same part for two devices
        ([((0, 4), (0, 4), (0, 8))], 2048),  # runs of 16 bytes: all is read
    ],
)
def test_a_process_reads_its_own_boxes(boxes: list[Any], count: int, tmp_path: Path) -> None:
    theirs = np.arange(2048, dtype=np.float32).reshape(32, 64)
    ours = theirs.reshape(4, 8, 64).transpose(2, 0, 1)
    rows = {box: np.full([stop - start for start, stop in box], -1, np.float32) for box in boxes}
    with OpenFiles() as files:
        transfer._read_rows(files, RULE, stored(tmp_path, theirs), (4, 8, 64), rows)
        assert files.bytes_read == 4 * count
    for box, row in rows.items():
        np.testing.assert_array_equal(row, ours[tuple(slice(*b) for b in box)])


def test_large_boxes_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 1000)
    theirs = np.arange(2048, dtype=np.float32).reshape(32, 64)
    tensor, box = stored(tmp_path, theirs), ((0, 4), (0, 8), (0, 64))
    with OpenFiles() as files:
        pieces = list(transfer._pieces(files, tensor, (4, 8, 64), box, None))
        uncut = list(transfer._pieces(files, tensor, (4, 8, 64), box, 0))
        assert list(transfer._pieces(files, tensor, (4, 8, 64), ((0, 4), (3, 3), (0, 64)), None)) == []
    assert max(values.nbytes for _, values in pieces) <= 1000 and len(pieces) == 12
    assert all(piece[0] == (0, 4) for piece, _ in uncut) and len(uncut) == 16
    whole = np.empty((4, 8, 64), np.float32)
    for piece, values in pieces:
        whole[tuple(slice(*b) for b in piece)] = values
    np.testing.assert_array_equal(whole, theirs.reshape(4, 8, 64))


@pytest.mark.parametrize("dims", [("data",), (None, "data"), (None, None, "data"), ()])
@pytest.mark.parametrize("interleaved", [0, 4])
def test_shards_are_written_where_they_are_read(dims: Any, interleaved: int, tmp_path: Path) -> None:
    rule = TensorRule("q", "q", "(h d) e -> e h d", interleaved=interleaved)
    theirs = np.arange(1024, dtype=np.float32).reshape(64, 16)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*dims))
    like = jax.ShapeDtypeStruct((16, 8, 8), "float32", sharding=sharding)
    (tmp_path / "out").mkdir()
    source, target = {"q": stored(tmp_path, theirs)}, {"q": stored(tmp_path / "out", 0 * theirs)}
    with OpenFiles() as files, ThreadPoolExecutor(2) as pool:
        value = transfer.read_parameter(pool, files, rule, source, like)
    with OpenFiles(1) as files:
        for shard in value.addressable_shards:  # as if each device had a process of its own
            if shard.replica_id == 0:
                box = tuple(s.indices(n)[:2] for s, n in zip(shard.index, value.shape, strict=True))
                transfer._write_rows(files, rule, target["q"], (8, 8, 16), {box: np.asarray(shard.data)})
    assert target["q"].file.read_bytes() == source["q"].file.read_bytes()
    order = rule.their_order(8)
    assert order.tolist() == ([0, 1, 2, 3, 4, 6, 5, 7] if interleaved else list(range(8)))
    np.testing.assert_array_equal(value, theirs.reshape(8, 8, 16)[:, order].transpose(2, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen2"])
def test_two_processes_load_and_export(case: str, tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    with two_processes(exported_together.__file__, GOLDEN / case, tmp_path, flags=flags) as workers:
        outputs_of(workers, timeout=240)
    values = lambda folder: {
        name: t.file.read_bytes()[t.start : t.start + t.size] for name, t in read_tensors(folder).items()
    }
    assert values(tmp_path / "out") == values(GOLDEN / case)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["error"] == found[1]["error"] and "process 1 of 2: " in found[0]["error"]
    if case == "qwen2":  # vectors are read by both, and all others by one
        whole = sum(t.size for t in read_tensors(GOLDEN / case).values())
        vectors = sum(t.size for t in read_tensors(GOLDEN / case).values() if len(t.shape) == 1)
        assert [one["read"] for one in found] == [vectors + (whole - vectors) // 2] * 2
    assert huggingface.read_config(tmp_path / "out") == huggingface.read_config(GOLDEN / case)
