"""``Mask``: which keys a query sees, as a rule on positions. Nothing of size seq² is built from it but a tile at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.figure import Figure

type Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Mask:
    """A query at position q sees a key at position k if all that is given here holds.

    Attributes:
      causal: ``k <= q``.
      window: the last so many tokens, itself included; or (tokens before, tokens behind), ``None`` for all of a side.
      prefix: keys before this position are seen by all, whatever ``causal`` and ``window`` say (prefix-LM).
      chunk: ``q // chunk == k // chunk`` (chunked-local attention).
      where: a function of positions, ``where(q, k)``, of broadcasting integer arrays, to booleans. It is called with a tile's
        positions at a time, and may be called with any positions of the sequence.

    Raises:
      ConfigError: a size that is no number of tokens, or a function that does not take two positions.

    >>> Mask(causal=True, window=2).visible(4, 3), Mask(causal=True, window=2).visible(4, 2)
    (True, False)
    """

    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    prefix: int | None = None
    chunk: int | None = None
    where: Rule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.window, tuple):
            sides: tuple[Any, ...] = self.window
            if len(sides) != 2 or any(side is not None and not _count(side, 0) for side in sides):
                raise ConfigError(
                    f"mask: window is {sides!r}, but (tokens before, tokens behind), 0 or more or None, is wanted."
                )
        elif self.window is not None and not _count(self.window, 1):
            raise ConfigError(f"mask: window is {self.window!r}, but a number of tokens, 1 or more, is wanted.")
        for name, value, least in (("prefix", self.prefix, 0), ("chunk", self.chunk, 1)):
            if value is not None and not _count(value, least):
                raise ConfigError(f"mask: {name} is {value!r}, but a number of tokens, {least} or more, is wanted.")
        if self.where is not None:
            _check_arity(self.where)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How many tokens before and behind itself a query sees at most; ``None`` for all."""
        before, behind = self.window if isinstance(self.window, tuple) else (None, None)
        if isinstance(self.window, int):
            before, behind = self.window - 1, None if self.causal else self.window - 1
        return before, 0 if self.causal else behind

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return self.sides == (None, None) and self.chunk is None and self.where is None

    def visible(self, q: Any, k: Any, prefix: Any = None) -> Any:
        """Whether ``q`` sees ``k``: positions that broadcast, as numbers, numpy's or jax's; ``prefix`` in the place of the mask's."""
        seen: Any = True
        before, behind = self.sides
        if before is not None:
            seen = k >= q - before
        if behind is not None:
            seen = seen & (k <= q + behind)
        prefix = self.prefix if prefix is None else prefix
        if prefix is not None:
            seen = seen | (k < prefix)
        if self.chunk is not None:
            seen = seen & (q // self.chunk == k // self.chunk)
        if self.where is not None:
            seen = seen & self.where(q, k)
        return seen

    def bounds(self, q: tuple[Any, Any], k: tuple[Any, Any], prefix: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Of blocks of tokens: whether some query may see some key, and whether every query surely sees every key.

        ``where`` is left out of the first and refuses the second: what a function of positions says is only known from its values.

        Args:
          q, k: the least and the greatest position of a block, numbers or arrays that broadcast.
          prefix: the least and the greatest length of the prefixes, in the place of the mask's.
        """
        some: Any = True
        every: Any = True
        before, behind = self.sides
        if before is not None:
            some, every = k[1] >= q[0] - before, k[0] >= q[1] - before
        if behind is not None:
            some, every = some & (k[0] <= q[1] + behind), every & (k[1] <= q[0] + behind)
        if prefix is None and self.prefix is not None:
            prefix = (self.prefix, self.prefix)
        if prefix is not None:
            some, every = some | (k[0] < prefix[1]), every | (k[1] < prefix[0])
        if self.chunk is not None:
            (a, b), (c, d) = ((x // self.chunk for x in block) for block in (q, k))
            some, every = some & (a <= d) & (c <= b), every & (a == b) & (c == d) & (a == c)
        return some, every & (self.where is None)

    def draw(
        self,
        path: str | PathLike[str] | None = None,
        *,
        seq: int,
        ways: int = 1,
        order: Any = "zigzag",
        block: int = 512,
        segment_ids: Any = None,
    ) -> Figure:
        """A picture of the tiles that each device computes: its colour is that of the device that has the queries.

        Tiles that the mask leaves whole are dark, those that it leaves in part lighter; white ones are not computed. Rows and
        columns go by position, however the tokens lie. The legend has each device's share of the work.

        Args:
          path: where to save it, in the format of its ending.
          seq, ways, order, block, segment_ids: as for :func:`jaxpar.balance`.

        Raises:
          ConfigError, LayoutError: as :func:`jaxpar.balance`.
          MissingExtraError: matplotlib is not installed.

        >>> Mask(causal=True).draw(seq=64, ways=4).axes[0].get_title(loc="left")
        'causal: 64 tokens over 4 devices, zigzag, tiles of 8'
        """
        from jaxpar.attn.picture import picture

        return picture(self, path, seq=seq, ways=ways, order=order, block=block, segment_ids=segment_ids)


def mask_of(causal: bool | None, mask: Mask | Rule | None) -> Mask:
    """The mask that ``causal`` and ``mask`` ask for; causal, where neither says anything.

    Raises:
      ConfigError: both say something, or ``mask`` is no mask.
    """
    if mask is None:
        return Mask(causal=causal is not False)
    if isinstance(mask, Mask):
        if causal is not None and causal is not mask.causal:
            raise ConfigError(
                f"attention: causal is {causal}, but the mask says causal={mask.causal}. Remedy: leave causal out, or say it in the mask."
            )
        return mask
    if not callable(mask):
        raise ConfigError(
            f"attention: mask is {type(mask).__name__}, but a jp.Mask or a function of two positions is wanted."
        )
    return Mask(causal=bool(causal), where=mask)


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_arity(where: Any) -> None:
    if not callable(where):
        raise ConfigError(f"mask: where is {where!r}, but a function of two positions, where(q, k), is wanted.")
    try:
        inspect.signature(where).bind(0, 0)
    except TypeError:
        wanted = ", ".join(inspect.signature(where).parameters)
        raise ConfigError(
            f"mask: where takes ({wanted}), but it is called with two positions. Remedy: a function where(q, k)."
        ) from None
    except ValueError:
        pass  # a builtin that tells nothing of its arguments
