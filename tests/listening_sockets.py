"""The TCP sockets on which processes listen, from Linux's ``/proc``."""

from __future__ import annotations

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def listening_sockets(pid: int) -> list[tuple[str, int]]:
    """Returns address and port of each socket on which a process listens."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                found.append((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """The address that the kernel prints as hexadecimal words of the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)
