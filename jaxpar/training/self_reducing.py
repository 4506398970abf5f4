"""The protocol of optimizers that reduce gradients themselves, such as :func:`jaxpar.one_bit_adam`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxpar.sharding.layout import Layout
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import Resolved
from jaxpar.training.model import Path


@runtime_checkable
class SelfReducing(Protocol):
    """An optimizer that receives each device's own gradients and reduces them in its update.

    The step computes gradients with a leading dim, [devices, ...], sharded over the axes of the batch, and does not
    reduce them. Parameters and moments are replicated over these axes.
    """

    def init(self, params: Any, dims: Mapping[Path, Names]) -> Any:
        """Returns the first state, for parameters with these logical dims."""

    def check_options(self, options: Iterable[tuple[str, Any, Any]]) -> None:
        """Raises ConfigError for the first option (name, value, the only value allowed) that it does not support."""

    def place(
        self,
        layout: Layout,
        path: Path,
        shape: Sequence[int],
        params: Mapping[Path, tuple[int, ...]],
        dims: Mapping[Path, Names],
    ) -> tuple[Names, Resolved] | None:
        """Returns how an array of its state is sharded; ``None`` for an array that is sharded as its parameter is."""

    def problems(
        self, layout: Layout, path: Path, shape: tuple[int, ...], dims: Mapping[Path, Names]
    ) -> tuple[str, ...]:
        """Returns what makes a parameter impossible to train, as texts."""

    def update_sharded(
        self, layout: Layout, dims: Mapping[Path, Names], grads: Any, state: Any, params: Any
    ) -> tuple[Any, Any]:
        """Returns updates and the new state, from per-device gradients [devices, ...]."""
