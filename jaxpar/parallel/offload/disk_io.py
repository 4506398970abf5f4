"""``Staging``: a queue between disk and device; one thread reads ahead and another writes behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self


class Staging:
    """Reads pieces ahead in order and writes their results behind; a context manager.

    The caller calls :meth:`get` for each piece in order, :meth:`put` with its result, and :meth:`finish` at the end. A
    piece occupies one of ``slots`` from the start of its read to the end of its write, so the host never holds more
    than the ``slots`` largest pieces.

    Args:
      sizes: the bytes of each piece.
      read: returns the content of a piece; the reading thread calls it.
      write: writes the result of a piece; the writing thread calls it.
      slots: the largest number of pieces in flight; with 1, nothing is read ahead.
      note: called with ``reading``, ``read`` or ``written`` and the piece.
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
        self._count_lock, self._staged, self.peak = threading.Lock(), 0, 0
        self._threads = [ThreadPoolExecutor(1, f"jaxpar-{name}") for name in ("reads", "writes")]
        self._reads: list[Future[Any]] = []
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._reads = [self._threads[0].submit(self._read_piece, piece) for piece in range(len(self._sizes))]
        return self

    def get(self, piece: int) -> Any:
        """Returns the content of a piece; may be called once per piece.

        Raises:
          Exception: the exception of this read, or of an earlier write, after which nothing more is read.
        """
        future, self._reads[piece] = self._reads[piece], Future()  # drops the last reference to the bytes
        found = future.result()
        if self._stopped.is_set():
            self.finish()
        return found

    def put(self, piece: int, made: Any) -> None:
        """Queues the result of a piece for writing; raises the exception of an earlier write."""
        if self._stopped.is_set():
            self.finish()
        self._writes.append(self._threads[1].submit(self._write_piece, piece, made))

    def finish(self) -> None:
        """Waits until all results are written; raises the exception of a failed write."""
        for write in self._writes:
            write.result()

    def _read_piece(self, piece: int) -> Any:
        self._slots.acquire()
        if self._stopped.is_set():
            return None
        self._note("reading", piece)
        self._count(self._sizes[piece])
        found = self._read(piece)
        self._note("read", piece)
        return found

    def _write_piece(self, piece: int, made: Any) -> None:
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
        with self._count_lock:
            self._staged += size
            self.peak = max(self.peak, self._staged)

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for read in self._reads:
            read.cancel()
        self._slots.release(len(self._sizes) or 1)  # wakes a reader that waits for a slot, so that it ends
        for thread in self._threads:
            thread.shutdown(wait=True)
