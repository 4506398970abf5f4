"""Which server owns which piece. A server that joins or leaves moves no more pieces than it must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxpar.errors import ConfigError
from jaxpar.parameter_server.pieces import ParamPiece

type Owners = dict[str, int]
"""The server of each piece, by the piece's key."""


def assign(pieces: Sequence[ParamPiece], servers: Sequence[int]) -> Owners:
    """Returns the owners of all pieces at the start: the largest piece first, each to the server with the fewest bytes.

    No server has more bytes than the mean plus one piece (Graham 1969).

    Args:
      pieces: what to distribute.
      servers: the numbers of the servers.

    Raises:
      ConfigError: there is no server.
    """
    if not servers:
        raise ConfigError("no server is left to hold the parameters. Remedy: at least one server.")
    return _place({}, pieces, servers)


def with_server(owners: Mapping[str, int], pieces: Sequence[ParamPiece], server: int) -> Owners:
    """Returns the owners after ``server`` has joined; pieces move only to it."""
    found, sizes = dict(owners), _bytes(owners, pieces)
    sizes[server] = 0
    for piece in sorted(pieces, key=_largest_first):
        old = found[piece.key]
        if old != server and sizes[server] + piece.spec.nbytes <= sizes[old] - piece.spec.nbytes:
            found[piece.key] = server
            sizes[old] -= piece.spec.nbytes
            sizes[server] += piece.spec.nbytes
    return found


def without_server(owners: Mapping[str, int], pieces: Sequence[ParamPiece], server: int, left: Sequence[int]) -> Owners:
    """Returns the owners after ``server`` has left; only its pieces move.

    Raises:
      ConfigError: no server is left.
    """
    if not left:
        raise ConfigError(
            f"server {server} is the last one, so nobody would hold its {len(owners)} pieces. Remedy: add a server "
            "first."
        )
    kept = {key: owner for key, owner in owners.items() if owner != server}
    return _place(kept, pieces, left)


def _place(kept: Owners, pieces: Sequence[ParamPiece], servers: Sequence[int]) -> Owners:
    found, sizes = dict(kept), dict.fromkeys(servers, 0) | _bytes(kept, pieces)
    for piece in sorted((p for p in pieces if p.key not in kept), key=_largest_first):
        owner = min(servers, key=lambda server: (sizes[server], server))
        found[piece.key] = owner
        sizes[owner] += piece.spec.nbytes
    return found


def _bytes(owners: Mapping[str, int], pieces: Iterable[ParamPiece]) -> dict[int, int]:
    sizes = dict.fromkeys(owners.values(), 0)
    for piece in pieces:
        if piece.key in owners:
            sizes[owners[piece.key]] += piece.spec.nbytes
    return sizes


def _largest_first(piece: ParamPiece) -> tuple[int, str, int]:
    return -piece.spec.nbytes, piece.name, piece.start
