"""``Mask``: which keys a query sees, as a rule on positions. Nothing of size seq² is built from it but a tile at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import is_count

type Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Mask:
    """A query at position q sees a key at position k if all that is given here holds.

    A mask is causal unless it says ``causal=False``, whatever else it says. Then a later token never changes an earlier result, with one
    exception: ``prefix`` shows all tokens of the prefix to each other.

    Attributes:
      causal: ``k <= q``. ``None``, the default, means ``True``, and is stored as such.
      window: the query's last ``window`` tokens, itself included; with ``causal=False`` as many tokens behind it too. Or a pair (tokens
        before, tokens behind), each 0 or more, or ``None`` for no limit on that side. Of any size.
      prefix: every query sees the keys before this position, whatever ``causal`` and ``window`` say (prefix-LM). Of any size.
      chunk: ``q // chunk == k // chunk`` (chunked-local attention). Of any size.
      where: a function of positions, ``where(q, k)``, of broadcasting integer arrays, to booleans. It is called with a tile's
        positions at a time, and may be called with any positions of the sequence.

    Raises:
      ConfigError: a size is not a number of tokens, ``where`` does not take two positions, or a window shows tokens behind the query
        where ``causal=False`` is missing.

    >>> Mask(window=2).visible(4, 3), Mask(window=2).visible(4, 2), Mask(window=2).visible(4, 5)
    (True, False, False)
    >>> Mask(causal=False, window=(0, 1)).visible(4, 5)
    True
    """

    causal: bool | None = None
    window: int | tuple[int | None, int | None] | None = None
    prefix: int | None = None
    chunk: int | None = None
    where: Rule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.window, tuple):
            sides: tuple[Any, ...] = self.window
            if len(sides) != 2 or any(side is not None and not is_count(side, 0) for side in sides):
                raise ConfigError(
                    f"mask: window is {sides!r}, but (tokens before, tokens behind), 0 or more or None, is wanted."
                )
            # Beside causal=True, None limits nothing; beside an unsaid ``causal`` it may mean all tokens behind.
            behind, allowed = sides[1], {None: (0,), True: (0, None)}.get(self.causal)
            if allowed is not None and behind not in allowed:
                raise ConfigError(
                    f"mask: window is {sides!r}, which shows tokens behind the query, but the mask is causal. Remedy: causal=False for a mask "
                    f"of two sides, or window=({sides[0]}, 0) for a causal one."
                )
        elif self.window is not None and not is_count(self.window, 1):
            raise ConfigError(f"mask: window is {self.window!r}, but a number of tokens, 1 or more, is wanted.")
        for name, value, least in (("prefix", self.prefix, 0), ("chunk", self.chunk, 1)):
            if value is not None and not is_count(value, least):
                raise ConfigError(f"mask: {name} is {value!r}, but a number of tokens, {least} or more, is wanted.")
        if self.where is not None:
            _check_arity(self.where)
        if self.causal is None:
            object.__setattr__(self, "causal", True)

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
        """Whether ``q`` sees ``k``: positions that broadcast, as numbers, numpy's or jax's; ``prefix`` replaces the mask's own."""
        seen: Any = True
        before, behind = self.sides
        if before is not None:
            seen = k >= _less(q, before)
        if behind is not None:
            seen = seen & (k <= _more(q, behind))
        prefix = self.prefix if prefix is None else prefix
        if prefix is not None:
            seen = seen | _below(k, prefix)
        if self.chunk is not None:
            seen = seen & (_chunk(q, self.chunk) == _chunk(k, self.chunk))
        if self.where is not None:
            seen = seen & self.where(q, k)
        return seen

    def bounds(self, q: tuple[Any, Any], k: tuple[Any, Any], prefix: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Of blocks of tokens: whether some query may see some key, and whether every query surely sees every key.

        ``where`` is left out of the first and refuses the second: what a function of positions says is only known from its values.

        Args:
          q, k: the least and the greatest position of a block, numbers or arrays that broadcast.
          prefix: the least and the greatest length of the prefixes; they replace the mask's own.
        """
        some: Any = True
        every: Any = True
        before, behind = self.sides
        if before is not None:
            some, every = k[1] >= _less(q[0], before), k[0] >= _less(q[1], before)
        if behind is not None:
            some, every = some & (k[0] <= _more(q[1], behind)), every & (k[1] <= _more(q[0], behind))
        if prefix is None and self.prefix is not None:
            prefix = (self.prefix, self.prefix)
        if prefix is not None:
            some, every = some | _below(k[0], prefix[1]), every | _below(k[1], prefix[0])
        if self.chunk is not None:
            (a, b), (c, d) = ((_chunk(x, self.chunk) for x in block) for block in (q, k))
            some, every = some & (a <= d) & (c <= b), every & (a == b) & (c == d) & (a == c)
        return some, every & (self.where is None)


def mask_of(causal: bool | None, mask: Mask | Rule | None) -> Mask:
    """The mask that ``causal`` and ``mask`` ask for: causal, unless ``causal`` is ``False`` or the mask says so.

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
    return Mask(causal=causal is not False, where=mask)


def _ends(x: Any) -> tuple[int, int]:
    """The least and the greatest number of the dtype of ``x``; a Python integer counts as int32, as all positions do."""
    if isinstance(x, int):
        return -(2**31), 2**31 - 1
    numbers: int = 256**x.dtype.itemsize
    return (0, numbers - 1) if x.dtype.kind == "u" else (-numbers // 2, numbers // 2 - 1)


def _less(x: Any, tokens: int) -> Any:
    """``x - tokens``, or the least number of its dtype where that is less: it must not wrap around to a large one."""
    least, greatest = _ends(x)
    tokens = min(tokens, greatest - least)
    while tokens:
        step = min(tokens, greatest)
        x = (max(x, least + step) if isinstance(x, int) else x.clip(least + step)) - step
        tokens -= step
    return x


def _more(x: Any, tokens: int) -> Any:
    """``x + tokens``, or the greatest number of its dtype."""
    least, greatest = _ends(x)
    tokens = min(tokens, greatest - least)
    while tokens:
        step = min(tokens, greatest)
        x = (min(x, greatest - step) if isinstance(x, int) else x.clip(None, greatest - step)) + step
        tokens -= step
    return x


def _below(x: Any, length: Any) -> Any:
    """``x < length``, also where ``length`` is an integer beyond the dtype of ``x``."""
    return x <= min(length - 1, _ends(x)[1]) if isinstance(length, int) else x < length


def _chunk(x: Any, size: int) -> Any:
    """``x // size``, also where ``size`` is beyond the dtype of ``x``: then it is 0, and -1 below 0."""
    return x // size if size <= _ends(x)[1] else (x < 0) * -1


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
