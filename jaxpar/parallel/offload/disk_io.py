"""``Staging``: pieces on their way between disk and device; read ahead by one thread, written behind by another, few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Staging:
    """A context: :meth:`get` each piece in its order, :meth:`put` what became of it, then :meth:`finish`.

    A piece takes one of ``slots`` from when it is begun to be read until it is written, so the host never holds more than the
    ``slots`` largest pieces.

    Args:
      sizes: bytes of each piece.
      read: piece → what is in it; called by the reading thread.
      write: piece and what :meth:`put` was given; called by the writing thread.
      slots: how many pieces may be on their way; with 1 nothing is read ahead.
      note: told ``read``, ``written`` and the piece, each when it is done, and ``reading`` when it begins.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        read: Callable[[int], Any],
        write: Callable[[int, Any], None],
        *,
        slots: int,
        note: Callable[[str, int], None] = lambda what, piece: None,
    ):
        self._sizes, self._read, self._write, self._note = sizes, read, write, note
        self._slots, self._stopped = threading.Semaphore(slots), threading.Event()
        self._counting, self._staged, self.peak = threading.Lock(), 0, 0
        self._threads = [ThreadPoolExecutor(1, f"jaxpar-{name}") for name in ("reads", "writes")]
        self._reads: list[Future[Any]] = []
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._reads = [self._threads[0].submit(self._bring, piece) for piece in range(len(self._sizes))]
        return self

    def get(self, piece: int) -> Any:
        """What was read of a piece, once; raises what reading raised, or an earlier write, after which nothing more is read."""
        future, self._reads[piece] = self._reads[piece], Future()  # nobody else shall hold the bytes
        found = future.result()
        if self._stopped.is_set():
            self.finish()
        return found

    def put(self, piece: int, made: Any) -> None:
        """Write what became of a piece; raises what an earlier write raised."""
        if self._stopped.is_set():
            self.finish()
        self._writes.append(self._threads[1].submit(self._send, piece, made))

    def finish(self) -> None:
        """Wait until all is written; raises what a write raised."""
        for write in self._writes:
            write.result()

    def _bring(self, piece: int) -> Any:
        self._slots.acquire()
        if self._stopped.is_set():
            return None
        self._note("reading", piece)
        self._count(self._sizes[piece])
        found = self._read(piece)
        self._note("read", piece)
        return found

    def _send(self, piece: int, made: Any) -> None:
        try:
            if not self._stopped.is_set():
                self._write(piece, made)
                self._note("written", piece)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            self._count(-self._sizes[piece])
            self._slots.release()

    def _count(self, size: int) -> None:
        with self._counting:
            self._staged += size
            self.peak = max(self.peak, self._staged)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for read in self._reads:
            read.cancel()
        self._slots.release(len(self._sizes) or 1)  # whoever waits for a slot sees that it is over
        for thread in self._threads:
            thread.shutdown(wait=True)
