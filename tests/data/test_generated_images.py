"""Generated images are the same in every call, and those held out are others."""

import numpy as np
import pytest
from error_texts import raises

from jaxpar.data import Ellipses, Gratings
from jaxpar.errors import DataError


@pytest.mark.parametrize("space", [2, 3])
def test_examples_are_repeatable_and_splits_differ(space: int) -> None:
    train, held = (Ellipses(split, size=16, space=space, classes=3) for split in ("train", "heldout"))
    first, again = train[7], train[7]
    assert first["image"].shape == (16,) * space + (1,) and first["label"].shape == (16,) * space
    np.testing.assert_array_equal(first["image"], again["image"])
    assert not np.array_equal(first["label"], held[7]["label"])
    assert len(train) == 4096 and set(np.unique(first["label"])) <= {0, 1, 2}


def test_sizes_out_of_range() -> None:
    with raises(DataError, "Ellipses: space"):
        Ellipses(size=0)


def test_gratings_out_of_range() -> None:
    with raises(DataError, "train", "size=16"):
        Gratings(size=16, classes=0)
    assert len(Gratings(examples=7)) == 7
