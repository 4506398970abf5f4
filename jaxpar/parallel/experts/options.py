"""The options of ``experts``, their checks, and the rows that a dispatch needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from jaxpar.errors import ConfigError, did_you_mean, listing
from jaxpar.sharding.names import Names
from jaxpar.sharding.rules import Axes
from jaxpar.utils.checks import is_count

Dispatch = Literal["auto", "ragged", "deduplicated", "gather", "all_to_all"]
DISPATCHES = ("auto", "ragged", "deduplicated", "gather", "all_to_all")
LOCAL = "local"
"""The dispatch where every device has all experts."""
_FEW_ROWS = 1024
"""With at most this many rows, tokens are not processed in pieces."""


_CALL, _DIMS = "jaxpar.experts", "jaxpar.dims"


@dataclass(frozen=True)
class ExpertCall:
    """A call of ``experts``, as a traced program states it in the name of its result.

    Attributes:
      experts: the number of experts.
      k: experts that a token chooses.
      row_bytes: bytes of a row.
      dispatch, capacity_factor, pieces: as for :func:`jaxpar.experts`.

    >>> call = ExpertCall(8, 2, 4096, "auto", 1.25)
    >>> call.name, ExpertCall.of(call.name) == call, ExpertCall.of("qkv")
    ('jaxpar.experts 8 2 4096 auto 1.25 None', True, None)
    """

    experts: int
    k: int
    row_bytes: int
    dispatch: str = "auto"
    capacity_factor: float | None = None
    pieces: int | None = None

    @property
    def name(self) -> str:
        """The name of the call's result."""
        facts = (self.experts, self.k, self.row_bytes, self.dispatch, self.capacity_factor, self.pieces)
        return " ".join([_CALL, *map(str, facts)])

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Returns the call that a name states, or ``None`` for another name."""
        first, *facts = name.split(" ")
        if first != _CALL:
            return None
        experts, k, row, dispatch, capacity, pieces = facts
        limit = None if capacity == "None" else float(capacity)
        return cls(int(experts), int(k), int(row), dispatch, limit, None if pieces == "None" else int(pieces))


def name_of_dims(dims: Names) -> str:
    """Returns the name of an operand of ``experts`` in a traced program, which states its logical dims.

    >>> dims_of_name(name_of_dims(("batch", None, "embed"))), dims_of_name("qkv")
    (('batch', None, 'embed'), None)
    """
    return f"{_DIMS} {','.join(dim or '' for dim in dims)}"


def dims_of_name(name: str) -> Names | None:
    """Returns the logical dims that a name states; ``None`` for another name."""
    first, _, dims = name.partition(" ")
    return tuple(dim or None for dim in dims.split(",")) if first == _DIMS else None


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes that determine what a dispatch sends and stores.

    Attributes:
      tokens: tokens of one device.
      k: experts that a token chooses.
      experts: experts of all devices.
      devices: devices over which the experts are sharded.
      token_devices: those of them that have different tokens; the others have the same.
    """

    tokens: int
    k: int
    experts: int
    devices: int
    token_devices: int

    @property
    def local_experts(self) -> int:
        return self.experts // self.devices

    @property
    def distinct_devices(self) -> float:
        """The number of devices that hold at least one of a token's experts, for a random choice."""
        others = math.comb(self.experts - self.local_experts, self.k) / math.comb(self.experts, self.k)
        return self.devices * (1 - others)


@dataclass(frozen=True)
class DispatchPlan:
    """How one device's tokens reach their experts and return.

    Attributes:
      dispatch: ``local``, ``ragged``, ``deduplicated``, ``gather`` or ``all_to_all``.
      axes: the mesh axes that shard the experts, major to minor; manual.
      token_axes: those of them along which devices have different tokens.
      sizes: the sizes.
      capacity: the rows of each expert from one device's tokens of a piece; ``None`` drops nothing.
      pieces: the number of pieces in which the tokens are processed.
      native: whether the platform has a ragged exchange.
    """

    dispatch: str
    axes: Axes
    token_axes: Axes
    sizes: ExpertSizes
    capacity: int | None
    pieces: int
    native: bool

    @property
    def piece_tokens(self) -> int:
        return self.sizes.tokens // self.pieces

    @property
    def most_rows(self) -> int:
        """The most rows that the tokens of a piece can bring to the experts of one device."""
        return most_rows(self.sizes, self.piece_tokens, self.capacity)

    @property
    def expected_rows(self) -> int:
        """The rows of the experts of one device if all experts are chosen equally often."""
        s = self.sizes
        rows = self.piece_tokens * s.k * s.token_devices / s.devices
        return min(math.ceil(rows), self.most_rows)

    def describe(self) -> str:
        """Returns what the plan does, as ``explain`` shows it.

        >>> sizes = ExpertSizes(tokens=4096, k=2, experts=8, devices=4, token_devices=4)
        >>> text = DispatchPlan("ragged", ("expert",), ("expert",), sizes, None, 4, True).describe()
        >>> text.split("; ")[0]
        '8 experts, 2 on each of 4 devices over expert (0 to 1 on the first)'
        >>> text.split("; ")[1]
        '4 pieces of 1024 tokens, each with room for 8192 rows on a device, 2048 if balanced'
        """
        s = self.sizes
        where = f"{s.experts} experts on every device"
        if s.devices > 1:
            first = f"0 to {s.local_experts - 1}" if s.local_experts > 1 else "0"
            where = (
                f"{s.experts} experts, {s.local_experts} on each of {s.devices} devices over {', '.join(self.axes)} "
                f"({first} on the first)"
            )
        pieces = f"{self.pieces} pieces of {self.piece_tokens} tokens, each" if self.pieces > 1 else "one piece"
        limit = "" if self.capacity is None else f"; at most {self.capacity} rows for an expert from each device"
        rows = f"with room for {self.most_rows} rows on a device, {self.expected_rows} if balanced"
        return f"{where}; {pieces} {rows}{limit}"


def most_rows(sizes: ExpertSizes, tokens: int, capacity: int | None) -> int:
    """Returns the most rows that ``tokens`` tokens of each device can bring to the experts of one device."""
    per_device = tokens * min(sizes.k, sizes.local_experts)
    if capacity is not None:
        per_device = min(per_device, sizes.local_experts * capacity)
    return sizes.token_devices * per_device


def pieces_for(sizes: ExpertSizes, capacity_factor: float | None) -> int:
    """Returns the fewest pieces in which the worst routing needs as many rows as the balanced one does in one piece.

    >>> pieces_for(ExpertSizes(tokens=4096, k=2, experts=8, devices=4, token_devices=4), None)
    4
    >>> pieces_for(ExpertSizes(tokens=4096, k=6, experts=64, devices=16, token_devices=16), None)
    16
    """
    if capacity_factor is not None or sizes.devices == 1:
        return 1
    enough = max(sizes.tokens * sizes.k, _FEW_ROWS)
    fits = lambda n: sizes.tokens % n == 0 and most_rows(sizes, sizes.tokens // n, None) <= enough
    return next(n for n in range(1, sizes.tokens + 1) if fits(n) or n == sizes.tokens)


def capacity_of(sizes: ExpertSizes, tokens: int, capacity_factor: float | None) -> int | None:
    """Returns the rows of each expert from ``tokens`` tokens of one device; ``None`` for no limit.

    >>> capacity_of(ExpertSizes(4096, 2, 8, 4, 4), 4096, 1.25)
    1280
    """
    if capacity_factor is None:
        return None
    return min(max(1, math.ceil(tokens * sizes.k / sizes.experts * capacity_factor)), tokens)


def check_options(dispatch: str, capacity_factor: float | None, pieces: int | None) -> None:
    """Raises if an option is unknown or out of range.

    Raises:
      ConfigError: the option, its value and the remedy.
    """
    if dispatch not in DISPATCHES:
        raise ConfigError(
            f"experts: dispatch must be one of {', '.join(DISPATCHES)}, got {dispatch!r}."
            f"{did_you_mean(dispatch, DISPATCHES)}"
        )
    number = isinstance(capacity_factor, int | float) and not isinstance(capacity_factor, bool)
    if capacity_factor is not None and not (number and 0 < capacity_factor < math.inf):
        raise ConfigError(
            f"experts: capacity_factor must be a number above 0, or None to drop nothing, got {capacity_factor!r}. "
            "Remedy: 1.25 gives each expert a quarter more rows than its share."
        )
    if dispatch == "all_to_all" and capacity_factor is None:
        raise ConfigError(
            "experts: dispatch 'all_to_all' sends the same number of rows to every expert, so it requires a "
            "capacity_factor. Remedy: capacity_factor=1.25, or dispatch='ragged', which drops nothing."
        )
    if pieces is not None and not is_count(pieces):
        raise ConfigError(f"experts: pieces must be a number of pieces >= 1, got {pieces!r}.")


def check_sizes(sizes: ExpertSizes, axes: Axes, pieces: int | None) -> None:
    """Raises if the sizes do not fit each other.

    Raises:
      ConfigError: the sizes and the remedy.
    """
    if sizes.experts % sizes.devices:
        raise ConfigError(
            f"experts: {sizes.experts} experts cannot be divided among {sizes.devices} devices over {listing(axes)}. "
            f"Remedy: a number of devices that divides {sizes.experts}."
        )
    if sizes.k > sizes.experts:
        raise ConfigError(
            f"experts: each token chooses {sizes.k} experts, but there are {sizes.experts}. Remedy: choose at most "
            f"{sizes.experts}."
        )
    if pieces is not None and sizes.tokens % pieces:
        raise ConfigError(
            f"experts: a device's {sizes.tokens} tokens cannot be cut into {pieces} pieces. Remedy: a number of pieces "
            f"that divides {sizes.tokens}, or leave pieces out."
        )
