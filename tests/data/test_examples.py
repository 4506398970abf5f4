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
    with pytest.raises(DataError) as caught:
        plan(EXAMPLES[:9]).stream(seed=3).set_state(stream.get_state())
    assert str(caught.value) == (
        "this data position belongs to another run: examples was 11, is now 9. Remedy: rebuild the stream with the "
        "saved values, or start this one from the beginning."
    )


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
REFUSED = {
    "keys": "example 3 has the arrays 'ids', 'image', 'name', but example 0 has 'ids', 'image', 'label'. Remedy: the "
    "same keys everywhere.",
    "shape": "example 3: image is float32 [3, 2], but in example 0 it is float32 [2, 3]. Remedy: pad, crop or cast, so "
    "that all are equal.",
    "dtype": "example 3: label is float32 [], but in example 0 it is int32 []. Remedy: pad, crop or cast, so that all "
    "are equal.",
    "text": "example 3: label must be an array of numbers, got str of dtype <U3. Remedy: encode it as numbers, or "
    "leave it out.",
    "none": "example 3 must be a pytree of arrays, got None. Remedy: such as {'image': image, 'label': 3}.",
}


@pytest.mark.parametrize("case", OTHER)
def test_an_example_that_differs_is_named(case: str) -> None:
    with pytest.raises(DataError) as caught:
        plan([*EXAMPLES[:3], OTHER[case], *EXAMPLES]).read(np.array([0, 1, 2, 3]))
    assert str(caught.value) == f"data: m:f: {REFUSED[case]}"


def test_what_cannot_be_batched_is_refused() -> None:
    def error(make: Any) -> str:
        with pytest.raises(DataError) as caught:
            make()
        return str(caught.value)

    assert error(lambda: plan(EXAMPLES[:3])) == (
        "data: m:f: 3 examples are too few for one global batch of 4. Remedy: a smaller data.batch, or more examples."
    )
    assert error(lambda: plan(process_count=3)) == (
        "batch=4 (global rows) cannot be divided evenly over process_count=3. Remedy: use a multiple of 3, such as 6."
    )
    assert error(lambda: Columns("data: m:f", {"x": np.zeros(3), "y": np.zeros(4)})) == (
        "data: m:f: a mapping of arrays must hold a row of each array for each example, got the lengths {'x': 3, 'y': "
        "4}. Remedy: arrays of one length, or a sequence of examples."
    )
    failing = error(lambda: plan(Failing(EXAMPLES)).read(np.arange(4)))
    assert failing.startswith("data: m:f: example 1 of 11 cannot be read: OSError: no such file (")
    assert failing.endswith("test_examples.py:77).")


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
    def error(batches: Any, take: int = 1, batch: int = 2, **options: Any) -> str:
        with pytest.raises(DataError) as caught:
            list(itertools.islice(BatchIterator("data: m:f", batches, batch, **options), take))
        return str(caught.value)

    assert error(iter([{"x": np.zeros((2, 3))}])) == (
        "data: m:f must give examples by number (__len__ and __getitem__) or an iterator with get_state and set_state, "
        "but list_iterator has no 'get_state', 'set_state', so a run could not resume. Remedy: return a sequence of "
        "examples, a mapping of arrays, or a grain dataset."
    )
    assert error(Counting(), batch=4) == (
        "data: m:f: batch 0: x has shape [2, 3], but its first dim must be the 4 rows of this process. Remedy: yield "
        "batches of the argument `batch` divided by `process_count`."
    )
    assert error(Counting(last=2), take=3) == (
        "data: m:f: the batches ended after 2 batches. Remedy: repeat them without end, or fewer train.steps."
    )
    stream = BatchIterator("data: m:f", Counting(complex), 2)
    with pytest.raises(DataError, match="get_state must return JSON values or bytes, got 0j"):
        stream.get_state()
    one, two = BatchIterator("data: m:f", Counting(), 2), BatchIterator("data: m:f", Counting(), 4, process_count=2)
    with pytest.raises(DataError, match="batch was 2, is now 4; processes was 1, is now 2"):
        two.set_state(one.get_state())
    state = {**one.get_state(), "position": "nonsense"}
    with pytest.raises(DataError, match=r"set_state\('nonsense'\) fails: ValueError: invalid literal"):
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
