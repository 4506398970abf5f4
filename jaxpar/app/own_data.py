"""Data that a configuration names: ``data: {factory: "my_module:make_data", args: {...}, batch: 32}``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np

from jaxpar.app.data_config import DataConfig
from jaxpar.app.user_code import failing_as, load_function
from jaxpar.data.examples import BatchIterator, Columns, ExamplePlan
from jaxpar.data.loader import Stream
from jaxpar.errors import ConfigError, DataError, did_you_mean, listing
from jaxpar.sharding.names import Names
from jaxpar.training.model import leaves_with_paths, show

TRAIN, HELDOUT = "train", "heldout"
_OFFERED = ("split", "batch", "seq", "seed", "process_index", "process_count")


@dataclass(eq=False)
class OwnData:
    """The data of a factory of the user's own.

    The factory is called as ``function(**args)``. It also gets, if it has arguments of these names: ``split``
    (``"train"``, or ``"heldout"`` for evaluation), ``batch`` (rows of the global batch), ``seq``, ``seed``,
    ``process_index`` and ``process_count``. It returns one of:

    - examples by number: an object with ``__len__`` and ``__getitem__``, whose examples are pytrees of arrays and
      numbers. They are shuffled, split over the processes, stacked and resumed by :mod:`jaxpar.data.examples`.
    - a mapping of arrays ``[examples, ...]``, of which example ``i`` is row ``i``.
    - an iterable whose iterator has ``get_state`` and ``set_state``, such as a ``grain.IterDataset``. It yields this
      process's ``batch // process_count`` rows of each batch.

    Attributes:
      name: ``module:function``.
      factory: the function.
      config: the table ``data``.
      takes: which of the offered arguments the factory takes.

    Raises:
      ConfigError: there is no such function, or it cannot be called.
      DataError: what it returns is no data, or an example holds something else than numbers.
    """

    name: str
    factory: Callable[..., Any]
    config: DataConfig
    takes: frozenset[str]
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def has_heldout(self) -> bool:
        """Whether there is data for evaluation: whether the factory takes ``split``."""
        return "split" in self.takes

    def shapes(self) -> Any:
        """Returns the shapes of a global batch, as one process would read it; needs no devices."""
        source = self._source(TRAIN, 0, 1)
        if not isinstance(source, ExamplePlan):
            before = source.get_state()
            arrays = next(source)
            source.set_state(before)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        return source.shapes()

    def stream(self, process_index: int = 0, process_count: int = 1) -> Stream:
        """Returns the training batches of one process."""
        source = self._source(TRAIN, process_index, process_count)
        return source.stream(self.config.seed) if isinstance(source, ExamplePlan) else source

    def heldout(self, max_batches: int, process_index: int = 0, process_count: int = 1) -> list[Any]:
        """Returns at most ``max_batches`` batches for evaluation, the same in every call; none without ``split``."""
        if not self.has_heldout:
            return []
        source = self._source(HELDOUT, process_index, process_count)
        if isinstance(source, ExamplePlan):
            return source.heldout(max_batches)
        before, found = source.get_state(), []
        for _ in range(max_batches):
            try:
                found.append(next(source))
            except DataError:
                if not found:
                    raise
                break  # fewer batches than asked for
        source.set_state(before)
        return found

    def heldout_identity(self) -> dict[str, int | str]:
        """Returns the number of examples for evaluation and their arrays, which must be equal when a run resumes."""
        source = self._source(HELDOUT, 0, 1) if self.has_heldout else None
        if not isinstance(source, ExamplePlan):
            return {}
        return {f"held-out {name}": value for name, value in source.identity().items()}

    def describe(self) -> str:
        """Returns a line about the data."""
        counts = []
        for split in (TRAIN, HELDOUT) if self.has_heldout else (TRAIN,):
            source = self._source(split, 0, 1)
            known = f"{source.windows:,} examples" if isinstance(source, ExamplePlan) else "batches of an iterator"
            counts.append(f"{known} {'to train on' if split == TRAIN else 'held out'}")
        held = "" if self.has_heldout else "; nothing is held out, because it takes no argument `split`"
        return f"{self.name}: {', '.join(counts)}{held}; batch {self.config.batch}"

    def _source(self, split: str, process_index: int, process_count: int) -> Any:
        """The plan of the examples, or the iterator; the factory is called once for equal arguments."""
        values = (split, self.config.batch, self.config.seq, self.config.seed, process_index, process_count)
        given = {name: value for name, value in zip(_OFFERED, values, strict=True) if name in self.takes}
        made = self._call(given)
        where = f"data: {self.name}" if split == TRAIN else f"data: {self.name} (heldout)"
        if isinstance(made, Mapping):
            made = Columns(where, made)
        if hasattr(made, "__len__") and hasattr(made, "__getitem__"):
            if isinstance(made, str | bytes):
                raise DataError(f"{where} must return examples, got {type(made).__name__}. {_RETURNS}")
            return ExamplePlan(where, made, self.config.batch, process_index, process_count)
        if not hasattr(made, "__iter__"):
            raise DataError(f"{where} must return examples, got {type(made).__name__}. {_RETURNS}")
        if process_count > 1 and not {"process_index", "process_count"} <= self.takes:
            raise DataError(
                f"{where} yields batches, but takes no process_index and process_count, so all {process_count} "
                "processes would read the same rows. Remedy: take both and yield this process's rows, or return "
                "examples by number."
            )
        return BatchIterator(where, iter(made), self.config.batch, process_index, process_count)

    def _call(self, given: Mapping[str, Any]) -> Any:
        key = tuple(sorted(given.items()))
        if key not in self._made:
            call = f"function(**args), with those of {listing(_OFFERED)} that it takes"
            with failing_as(f"data: {self.name} fails with args {self.config.args}", call):
                self._made[key] = self.factory(**self.config.args, **given)
        return self._made[key]


_RETURNS = "Remedy: a sequence of examples, a mapping of arrays, or an iterable with get_state and set_state."


def own_data(config: DataConfig) -> OwnData | None:
    """Returns the data that a configuration names; ``None`` if it names a text.

    Raises:
      ConfigError: there is no such function, or a key is only for text, or only for a factory.
    """
    if config.factory is None:
        for key in ("args", "dims"):
            if getattr(config, key):
                raise ConfigError(
                    f"data.{key} is for data.factory, but the data is the text {config.source!r}. Remedy: leave "
                    f"data.{key} out, or set data.factory."
                )
        return None
    function = load_function(config.factory, "data.factory")
    takes = frozenset(_OFFERED) & inspect.signature(function).parameters.keys() - config.args.keys()
    default, used = DataConfig(), {"factory", "args", "dims", "batch", "seed", *takes}
    for key in (one.name for one in fields(DataConfig) if one.name not in used):
        if getattr(config, key) != getattr(default, key):
            why = f"{config.factory} takes no argument `seq`" if key == "seq" else "data.factory names data of your own"
            raise ConfigError(f"data.{key} is set, but {why}. Remedy: leave data.{key} out.")
    return OwnData(config.factory, function, config, takes)


def check_dims(dims: Mapping[str, Names], batch: Any) -> dict[str, Names]:
    """Returns the given names of the batch's arrays by path, after checking them against the arrays.

    Raises:
      ConfigError: there is no such array, or it has another number of dims.
    """
    shapes = {show(path): x.shape for path, x in leaves_with_paths(batch)}
    for name, names in dims.items():
        if name not in shapes:
            raise ConfigError(
                f"data.dims names {name!r}, but the batch has {listing(shapes)}.{did_you_mean(name, shapes)}"
            )
        if len(names) != len(shapes[name]):
            raise ConfigError(
                f"data.dims: {name} must have a name or null for each of its {len(shapes[name])} dims "
                f"{list(shapes[name])}, got {list(names)}."
            )
    return {name: tuple(names) for name, names in dims.items()}


def tokens_of(batch: Any) -> int | None:
    """Returns the number of tokens in a batch: the size of its array ``tokens`` of integers [batch, seq], if any.

    >>> tokens_of({"tokens": np.zeros((4, 8), np.int32)}), tokens_of({"image": np.zeros((4, 8, 8, 3))})
    (32, None)
    """
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    shape, dtype = getattr(tokens, "shape", ()), getattr(tokens, "dtype", None)
    return int(np.prod(shape)) if len(shape) == 2 and dtype is not None and dtype.kind in "iu" else None
