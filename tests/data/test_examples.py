"""Batches of examples of any kind: their content for every number of processes, their position, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_texts import raises

from jaxpar.data.examples import BatchIterator, Columns, ExamplePlan
from jaxpar.data.lazy_rows import LazyRows, reads_in_parts
from jaxpar.errors import DataError

EXAMPLES: list[Any] = [{"image": np.full((2, 3), i, np.float64), "label": i, "ids": [[i, i + 1]]} for i in range(11)]


def plan(examples: Any = EXAMPLES, **options: Any) -> ExamplePlan:
    return ExamplePlan("data: m:f", examples, **{"batch": 4, **options})


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_examples_are_stacked_in_the_dtypes_of_jax() -> None:
    batch = plan().read(np.array([7, 0, 1, 10]))
    assert batch["label"].tolist() == [7, 0, 1, 10] and batch["ids"].tolist() == [[[i, i + 1]] for i in (7, 0, 1, 10)]
    assert batch["image"].shape == (4, 2, 3) and batch["image"][3].tolist() == [[10.0] * 3] * 2
    assert {name: str(x.dtype) for name, x in batch.items()} == {"image": "float32", "label": "int32", "ids": "int32"}
    shapes = plan().shapes()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def test_processes_together_see_what_one_process_sees_each_epoch_once() -> None:
    taken = list(itertools.islice(plan().stream(seed=3), 6))
    epochs = [[int(i) for b in taken[e : e + 2] for i in b["label"]] for e in (0, 2, 4)]
    assert all(len(set(epoch)) == 8 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    halves = [itertools.islice(plan(process_index=i, process_count=2).stream(seed=3), 6) for i in range(2)]
    for both, *parts in zip(taken, *halves, strict=True):
        assert same(both, jax.tree.map(lambda *x: np.concatenate(x), *parts))


def test_a_position_is_json_and_continues_exactly() -> None:
    stream, other = plan().stream(seed=3), plan().stream(seed=3)
    list(itertools.islice(stream, 3))
    other.set_state(json.loads(json.dumps(stream.get_state())))
    assert all(same(next(stream), next(other)) for _ in range(4))
    with raises(DataError, "examples", "was 11"):
        plan(EXAMPLES[:9]).stream(seed=3).set_state(stream.get_state())


def test_held_out_batches_are_spread_over_the_examples() -> None:
    assert [b["label"].tolist() for b in plan(batch=2).heldout(2)] == [[0, 2], [5, 8]]
    assert len(plan(batch=2).heldout(100)) == 5


def test_rows_of_arrays_are_examples() -> None:
    columns = Columns("data: m:f", {"x": np.arange(6).reshape(3, 2), "deep": {"y": [7, 8, 9]}})
    batch = plan(columns, batch=2).read(np.array([2, 0]))
    assert batch["x"].tolist() == [[4, 5], [0, 1]] and batch["deep"]["y"].tolist() == [9, 7]


class Failing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index:
            raise OSError("no such file")
        return super().__getitem__(index)


OTHER = {
    "keys": {"image": np.zeros((2, 3)), "name": 1, "ids": [[0, 0]]},
    "shape": {"image": np.zeros((3, 2)), "label": 1, "ids": [[0, 0]]},
    "dtype": {"image": np.zeros((2, 3)), "label": 1.5, "ids": [[0, 0]]},
    "text": {"image": np.zeros((2, 3)), "label": "cat", "ids": [[0, 0]]},
    "none": None,
}


@pytest.mark.parametrize("case", OTHER)
def test_an_example_that_differs_is_named(case: str) -> None:
    with raises(DataError, "data", "example 3"):
        plan([*EXAMPLES[:3], OTHER[case], *EXAMPLES]).read(np.array([0, 1, 2, 3]))


def test_what_cannot_be_batched_is_refused() -> None:
    def error(make: Any, *, name: str) -> None:
        with raises(DataError, name):
            make()

    error(lambda: plan(EXAMPLES[:3]), name="3 examples")
    error(lambda: plan(process_count=3), name="process_count")
    error(lambda: Columns("data: m:f", {"x": np.zeros(3), "y": np.zeros(4)}), name="'y': 4")
    error(lambda: plan(Failing(EXAMPLES)).read(np.arange(4)), name="example 1")


class Counting(Iterator[Any]):
    """Batches that hold their own number; the state has the given type."""

    def __init__(self, kind: type = int, last: int = 100):
        self.number, self._kind, self._last = 0, kind, last

    def __next__(self) -> Any:
        if self.number == self._last:
            raise StopIteration
        self.number += 1
        return {"x": np.full((2, 3), self.number)}

    def get_state(self) -> Any:
        return json.dumps(self.number).encode() if self._kind is bytes else self._kind(self.number)

    def set_state(self, state: Any) -> None:
        self.number = int(json.loads(state)) if self._kind is bytes else int(state)


@pytest.mark.parametrize("kind", [int, str, bytes])
def test_an_iterator_continues_from_its_own_state(kind: type) -> None:
    one, two = (BatchIterator("data: m:f", Counting(kind), 2) for _ in range(2))
    list(itertools.islice(one, 3))
    two.set_state(json.loads(json.dumps(one.get_state())))
    assert next(two)["x"].tolist() == [[4] * 3] * 2 and next(two)["x"].dtype == np.int32


def test_iterators_that_cannot_be_trained_on_are_refused() -> None:
    def error(batches: Any, take: int = 1, batch: int = 2, *, name: str, **options: Any) -> None:
        with raises(DataError, name):
            list(itertools.islice(BatchIterator("data: m:f", batches, batch, **options), take))

    error(iter([{"x": np.zeros((2, 3))}]), name="len__")
    error(Counting(), batch=4, name="data")
    error(Counting(last=2), take=3, name="data")
    stream = BatchIterator("data: m:f", Counting(complex), 2)
    with raises(DataError, "JSON", "data"):
        stream.get_state()
    one, two = BatchIterator("data: m:f", Counting(), 2), BatchIterator("data: m:f", Counting(), 4, process_count=2)
    with raises(DataError, "batch", "processes", "was 2"):
        two.set_state(one.get_state())
    state = {**one.get_state(), "position": "nonsense"}
    with raises(DataError, "nonsense"):
        one.set_state(state)


def test_a_dataset_of_grain_is_both() -> None:
    import grain

    numbers = grain.MapDataset.range(20).map(lambda i: {"x": np.full(3, i)})
    assert plan(numbers).read(np.arange(4))["x"].tolist() == [[i] * 3 for i in range(4)]
    batches = lambda: BatchIterator("data: m:f", iter(numbers.repeat().batch(4).to_iter_dataset()), 4)
    one, two = batches(), batches()
    list(itertools.islice(one, 7))
    two.set_state(json.loads(json.dumps(one.get_state())))
    assert same(next(one), next(two))
    one.close()


def test_rows_of_files_are_read_when_they_are_indexed(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(2, 6, 5))
    for number, x in enumerate(whole):
        np.save(tmp_path / f"{number}.npy", x)
    files = [np.load(tmp_path / f"{number}.npy", mmap_mode="r") for number in range(2)]
    assert reads_in_parts(files[0]) and not reads_in_parts(whole)
    rows = LazyRows(files)
    assert (rows.ndim, rows.nbytes, rows.dtype) == (3, 4 * 60, np.float32)
    np.testing.assert_array_equal(np.asarray(rows), whole.astype(np.float32))
    assert np.asarray(rows, np.float64).dtype == np.float64
    np.testing.assert_array_equal(rows[1:2, 2:4, :], whole[1:2, 2:4].astype(np.float32))
