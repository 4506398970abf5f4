"""Agreement between the processes of a run: an error of one process is raised by all, and common settings are compared.

A process that fails or goes on alone leaves the others in a collective that never ends. Values that may differ between
processes (files, command lines, arguments) are therefore settled here first. The data are exchanged over one device of
each process; with one process nothing is exchanged.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import errors
from jaxpar.errors import ConfigError, JaxparError, LaunchError

_ROW = 2048
"""Bytes of the first exchange, after a length of four bytes; longer data take a second exchange."""


def gather_rows(row: np.ndarray) -> np.ndarray:
    """Returns one row ``[n]`` of every process as ``[processes, n]``, on all of them.

    All processes call it, with the same ``n`` and dtype.

    >>> gather_rows(np.arange(3)).tolist()
    [[0, 1, 2]]
    """
    if jax.process_count() == 1:
        return row[None]
    sharded, gather_all = _gathering()
    return np.asarray(gather_all(jax.make_array_from_process_local_data(sharded, row[None])))


@functools.cache
def _gathering() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Returns the sharding with a row on one device per process, and a function that gathers all rows on each."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[rank] for rank in sorted(first)]), ("process",))
    replicated = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("process")), jax.jit(lambda rows: rows, out_shardings=replicated)


def gather(mine: bytes) -> list[bytes]:
    """Returns the bytes of every process, on all of them. All processes call it, with bytes of any length.

    >>> gather(b"abc")
    [b'abc']
    """
    if jax.process_count() == 1:
        return [mine]
    rows = gather_rows(_row(mine, _ROW))
    sizes = [int.from_bytes(row[:4].tobytes(), "little") for row in rows]
    if max(sizes) > _ROW:
        rows = gather_rows(_row(mine, 1 << (max(sizes) - 1).bit_length()))
    return [row[4 : 4 + size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _row(mine: bytes, room: int) -> np.ndarray:
    row = np.zeros(4 + room, np.uint8)
    row[:4] = np.frombuffer(len(mine).to_bytes(4, "little"), np.uint8)
    row[4 : 4 + min(len(mine), room)] = np.frombuffer(mine[:room], np.uint8)
    return row


def settled[T](work: Callable[[], T]) -> T:
    """Returns ``work()``; if it fails in any process, every process raises that error. All processes call it.

    Raises:
      JaxparError: the error of the first process that failed, of the same class. The text names the processes with this
        error, unless all of them have it.
      LaunchError: another process failed with an error that is not a ``JaxparError``.

    >>> settled(lambda: 3)
    3
    """
    made, error = None, None
    try:
        made = work()
    except Exception as caught:
        if jax.process_count() == 1:
            raise
        error = caught
    mine = None if error is None else [type(error).__name__, str(error)]
    reports = [json.loads(text) for text in gather(json.dumps(mine).encode())]
    failed = [rank for rank, one in enumerate(reports) if one is not None]
    if not failed:
        return made  # type: ignore[return-value]  # there is no error, so it was made
    if error is not None and (not isinstance(error, JaxparError) or all(one == reports[0] for one in reports)):
        raise error
    raise _shared_error(reports, failed) from error


def _shared_error(reports: Sequence[list[str] | None], failed: Sequence[int]) -> JaxparError:
    """Returns the error that every process raises, whichever processes failed."""
    kind, text = reports[failed[0]] or ("", "")
    ranks = [rank for rank in failed if reports[rank] == reports[failed[0]]]
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, JaxparError)):
        known, text = LaunchError, f"{kind}: {text}"
    names = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
    return known(f"{names} of {len(reports)}: {text}")


def check_same(where: str, facts: Mapping[str, Any], remedy: str) -> None:
    """Checks that ``facts`` are the same in all processes. All processes call it.

    Args:
      where: the beginning of the error text.
      facts: name → a JSON value. An error shows the values, so large ones should be summarized.
      remedy: the end of the error text.

    Raises:
      ConfigError: a fact differs; every process raises it, with the first such name.

    >>> check_same("generate", {"seed": 1}, "the same command line everywhere.")
    """
    every = [json.loads(text) for text in gather(json.dumps(dict(facts)).encode())]
    for name in dict.fromkeys(name for one in every for name in one):
        values = [_shown(one.get(name)) for one in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"{where}: {name} differs between processes: {values[0]} in process 0, {values[other]} in process "
                f"{other} of {len(every)}. Remedy: {remedy}"
            )


def _shown(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
