"""``shorter_log``: in a terminal, what a compiler warns of in one line each."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REPLICATED = re.compile(rb"Involuntary full rematerialization.* for HLO operation %?[\w.-]+ = ([^\s{]+)")


@contextmanager
def shorter_log(tell: Callable[[str], None]) -> Iterator[None]:
    """While it is open, the compiler's warnings of replicated tensors are counted; at its end they are told in a line.

    XLA writes each of them as a paragraph to the file descriptor of standard error. All other lines pass at once.
    Where standard error is not a terminal, such as in a log, nothing changes.

    Args:
      tell: called with the line, if there was a warning.
    """
    if not sys.stderr.isatty():
        yield
        return
    found: dict[str, int] = {}
    screen, (end, begin) = os.dup(2), os.pipe()
    os.dup2(begin, 2)
    os.close(begin)
    reader = threading.Thread(target=_forward, args=(end, screen, found), daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.dup2(screen, 2)  # closes the last end of the pipe to which anything is written, so the reader ends
        reader.join(timeout=1.0)
        os.close(screen)
        if found:
            tell(describe(found))


def _forward(end: int, screen: int, found: dict[str, int]) -> None:
    """Copies lines to the screen, but counts the tensors of warnings."""
    with os.fdopen(end, "rb") as lines:
        for line in lines:
            if (match := _REPLICATED.search(line)) is None:
                os.write(screen, line)
            else:
                tensor = match[1].decode(errors="replace")
                found[tensor] = found.get(tensor, 0) + 1


def describe(found: dict[str, int]) -> str:
    """Returns a line about replicated tensors; ``found`` counts the warnings of each type and shape.

    >>> print(describe({"f32[4,8]": 2}))
    compiler  replicates a tensor f32[4,8] (2 x) on every device to change its sharding; `check --topology` says where
    """
    tensors = ", ".join(f"{tensor}{f' ({count} x)' if count > 1 else ''}" for tensor, count in found.items())
    return (
        f"compiler  replicates a tensor {tensors} on every device to change its sharding; `check --topology` says where"
    )
