"""Generated images: bright ellipses on a noisy background, to segment; striped images, to classify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.errors import DataError
from jaxpar.utils.checks import is_count


@dataclass(frozen=True)
class Ellipses:
    """Images with an ellipse of each class but 0, the background; example ``i`` is the same in every call.

    ``data.factory: jaxpar.data:Ellipses`` of a configuration names it.

    Attributes:
      split: ``train`` or ``heldout``, which have no example in common.
      size: height and width in pixels, and depth.
      space: 2 for images, 3 for volumes.
      classes: number of classes.
      examples: number of examples.
      noise: standard deviation of the noise; an ellipse of class c is c brighter than the background.

    Raises:
      DataError: a size is out of range.

    >>> example = Ellipses("train", size=32, classes=3)[5]
    >>> example["image"].shape, example["label"].shape, np.unique(example["label"]).tolist()
    ((32, 32, 1), (32, 32), [0, 1, 2])
    """

    split: str = "train"
    size: int = 64
    space: int = 2
    classes: int = 4
    examples: int = 4096
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.space not in (2, 3) or not all(map(is_count, (self.size, self.classes, self.examples))):
            raise DataError(
                f"Ellipses: space must be 2 or 3, and size, classes and examples at least 1, got {self}. Remedy: such "
                "as size=64, space=2, classes=4."
            )

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng((index, self.split == "train"))
        grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, self.size)] * self.space, indexing="ij"))
        label = np.zeros((self.size,) * self.space, np.int32)
        across = (self.space,) + (1,) * self.space
        for kind in range(1, self.classes):
            centre, radii = rng.uniform(-0.7, 0.7, across), rng.uniform(0.2, 0.5, across)
            label[np.sum(((grid - centre) / radii) ** 2, axis=0) < 1] = kind
        image = label + self.noise * rng.standard_normal(label.shape)
        return {"image": image[..., None].astype(np.float32), "label": label}


@dataclass(frozen=True)
class Gratings:
    """Images of stripes under noise, whose class is the direction of the stripes; example ``i`` is always the same.

    ``data.factory: jaxpar.data:Gratings`` of a configuration names it.

    Attributes:
      split: ``train`` or ``heldout``, which have no example in common.
      size: height and width in pixels.
      channels: channels of a pixel, all of the same stripes under noise of their own.
      classes: number of directions, evenly spaced over half a turn.
      examples: number of examples.
      noise: standard deviation of the noise; stripes range from -1 to 1.

    Raises:
      DataError: a size is out of range.

    >>> example = Gratings("train", size=16, classes=4)[5]
    >>> example["images"].shape, example["labels"].shape, 0 <= int(example["labels"]) < 4
    ((16, 16, 3), (), True)
    """

    split: str = "train"
    size: int = 64
    channels: int = 3
    classes: int = 16
    examples: int = 4096
    noise: float = 0.5

    def __post_init__(self) -> None:
        if not all(map(is_count, (self.size, self.channels, self.classes, self.examples))):
            raise DataError(
                f"Gratings: size, channels, classes and examples must be at least 1, got {self}. Remedy: such as "
                "size=64, channels=3, classes=16."
            )

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng((index, self.split == "train"))
        label = int(rng.integers(self.classes))
        angle, phase, waves = np.pi * label / self.classes, rng.uniform(0, 2 * np.pi), rng.uniform(3, 6)
        y, x = np.meshgrid(*[np.linspace(-1, 1, self.size)] * 2, indexing="ij")
        stripes = np.sin(np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        image = stripes[..., None] + self.noise * rng.standard_normal((self.size, self.size, self.channels))
        return {"images": image.astype(np.float32), "labels": np.int32(label)}
