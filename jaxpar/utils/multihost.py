"""What the processes of a run tell each other where none may go on alone: an error of one is raised by all, and what must be the same is compared.

A process that goes its own way leaves the others in a collective that never ends. So whatever may differ between processes (files, command
lines, arguments) is settled here first. It goes over the devices, one of each process; a process alone asks nobody.
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
"""Bytes that go at once, a length of four before them; what is longer goes in a second round."""


def gather_rows(row: np.ndarray) -> np.ndarray:
    """One row [n] of numbers of each process, on all of them [processes, n]; all call it, with the same ``n`` and dtype.

    >>> gather_rows(np.arange(3)).tolist()
    [[0, 1, 2]]
    """
    if jax.process_count() == 1:
        return row[None]
    spread, everywhere = _gathering()
    return np.asarray(everywhere(jax.make_array_from_process_local_data(spread, row[None])))


@functools.cache
def _gathering() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """A row on the first device of each process, and what brings them all to each."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[rank] for rank in sorted(first)]), ("process",))
    whole = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("process")), jax.jit(lambda rows: rows, out_shardings=whole)


def gather(mine: bytes) -> list[bytes]:
    """Some bytes of each process, on all of them; all call it.

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
    """Do ``work``, which may fail in one process alone; then every process raises what that one did, and names it. All call it.

    Raises:
      JaxparError: that of the first process that has one, of its class, with the processes before it unless all have the same.
      LaunchError: another process failed with what is no ``JaxparError``.

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
    told = [json.loads(text) for text in gather(json.dumps(_said(error)).encode())]
    failed = [rank for rank, one in enumerate(told) if one is not None]
    if not failed:
        return made  # type: ignore[return-value]  # there is no error, so it was made
    if error is not None and (not isinstance(error, JaxparError) or all(one == told[0] for one in told)):
        raise error
    raise _told(told, failed) from error


def _said(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    return [type(error).__name__, str(error)]


def _told(told: Sequence[list[str] | None], failed: Sequence[int]) -> JaxparError:
    """The same error on every process, whichever it came from."""
    kind, text = told[failed[0]] or ("", "")
    alike = [rank for rank in failed if told[rank] == told[failed[0]]]
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, JaxparError)):
        known, text = LaunchError, f"{kind}: {text}"
    who = f"process {alike[0]}" if len(alike) == 1 else f"processes {', '.join(map(str, alike))}"
    return known(f"{who} of {len(told)}: {text}")


def check_same(where: str, facts: Mapping[str, Any], remedy: str) -> None:
    """Whether all processes have the same ``facts``, each a name and what is said of it (JSON). All call it.

    Args:
      where: what begins the error's text.
      facts: by names; all that an error is to tell of a value.
      remedy: what to do, with which the text ends.

    Raises:
      ConfigError: naming the first that differs, on every process.

    >>> check_same("generate", {"seed": 1}, "the same command line everywhere.")
    """
    every = [json.loads(text) for text in gather(json.dumps(dict(facts)).encode())]
    for name in sorted({name for one in every for name in one}, key=_order(every)):
        values = [_shown(one.get(name)) for one in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"{where}: {name} is not the same in all processes: {values[0]} in process 0, {values[other]} in process {other} of {len(every)}. "
                f"Remedy: {remedy}"
            )


def _order(every: Sequence[Mapping[str, Any]]) -> Callable[[str], int]:
    names = list(dict.fromkeys(name for one in every for name in one))
    return names.index


def _shown(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
