"""Text sources: the interpreter's standard library, a generated text, or a folder of files.

Text is bytes and the vocabulary has 256 tokens, so there is no tokenizer to train or to download.

>>> from jaxpar.data import load_text
>>> text = load_text("synthetic")
>>> text.vocab, text.files, text.train.dtype.name
(256, 256, 'uint8')
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random

import numpy as np

from jaxpar.errors import DataError, did_you_mean, listing

DEFAULT_PATTERNS = ("*.txt", "*.md", "*.rst", "*.py")
NAMED_SOURCES = ("stdlib", "synthetic")

# Inserted between two files, so that the end of one is not read as context of the next. Text hardly ever contains it.
SEPARATOR = b"\0"

# Third-party packages live below the stdlib folder but differ from machine to machine. Caches are not text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, eq=False)
class Text:
    """A text, split into a training part and a held-out part.

    Attributes:
        name: name of the source: ``"stdlib"``, ``"synthetic"``, or that of the folder.
        train: training bytes, uint8 ``[n]``, read-only.
        heldout: held-out bytes, uint8 ``[m]``, read-only.
        vocab: number of possible tokens: 256.
        files: total number of files, held-out ones included.
        heldout_files: number of held-out files.

    >>> text = load_text("synthetic")
    >>> text.name, text.train.dtype, text.vocab
    ('synthetic', dtype('uint8'), 256)
    """

    name: str
    train: np.ndarray
    heldout: np.ndarray
    vocab: int
    files: int
    heldout_files: int


def load_text(
    source: str | os.PathLike[str],
    *,
    heldout_fraction: float = 0.05,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    seed: int = 0,
) -> Text:
    """Returns a text as bytes, split file by file into training and held-out parts.

    A file is held out when the hash of ``seed`` and of its path relative to the folder falls in the lowest
    ``heldout_fraction`` of the hash's range. No other file affects this, so adding or removing files never moves a file
    between the parts. The fraction counts files, not bytes, and is met on average.

    Non-empty files are joined by a byte 0, in sorted order of their relative paths.

    Args:
        source: one of

            - ``"stdlib"``: every ``*.py`` of the running interpreter's library, without installed packages (some
              distributions leave out the large ``test`` package);
            - ``"synthetic"``: 1 MiB of sentences generated from ``seed``, in which the next word depends on the current
              one;
            - a folder, searched recursively; write ``"./stdlib"`` for a folder of that name. Hidden files and folders
              are skipped, and symbolic links to folders are not followed.
        heldout_fraction: expected fraction of the files to hold out, strictly between 0 and 1.
        patterns: shell patterns of the file names to read from a folder; the two named sources ignore them.
        seed: determines the held-out files and the words of the synthetic text.

    Returns:
        The text; see :class:`Text` for shapes.

    Raises:
        DataError: the source is unknown or is not a folder, no file matches, the fraction is not between 0 and 1, or
            the split leaves one part without files.
        OSError: a file or folder cannot be read.

    >>> text = load_text("synthetic", heldout_fraction=0.1)
    >>> text.train.size + text.heldout.size, text.heldout_files
    (1048830, 28)
    """
    if not 0.0 < heldout_fraction < 1.0:
        raise DataError(f"heldout_fraction must be strictly between 0 and 1, got {heldout_fraction}.")
    name, documents = _documents(source, (patterns,) if isinstance(patterns, str) else tuple(patterns), seed)
    train: list[bytes] = []
    heldout: list[bytes] = []
    for path, content in documents:
        (heldout if _is_heldout(path, heldout_fraction, seed) else train).append(content)
    if not train or not heldout:
        raise DataError(
            f"text {name!r}: the split left {len(train)} training and {len(heldout)} held-out files of "
            f"{len(documents)} (heldout_fraction={heldout_fraction}, seed={seed}), and both parts need at least one. "
            f"Remedy: {'raise' if train else 'lower'} heldout_fraction, change seed, or split the text into more files."
        )
    files, heldout_files = len(documents), len(heldout)
    return Text(name, _joined(train), _joined(heldout), vocab=256, files=files, heldout_files=heldout_files)


def _documents(
    source: str | os.PathLike[str], patterns: tuple[str, ...], seed: int
) -> tuple[str, list[tuple[str, bytes]]]:
    """Returns the text's name and its ``(relative path, content)`` pairs, sorted and without empty files."""
    if source == "synthetic":
        return "synthetic", list(_synthetic(seed))
    if source == "stdlib":
        return "stdlib", _read(Path(sysconfig.get_path("stdlib")), ("*.py",))
    folder = _folder(os.fspath(source))
    return folder.resolve().name, _read(folder, patterns)


def _folder(source: str) -> Path:
    """Returns the folder ``source``, or raise a DataError that tells a mistyped name from a wrong path."""
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return folder
    if folder.is_file():
        raise DataError(f"text source {source!r} is a file, not a folder. Remedy: pass the folder that contains it.")
    if folder.name == source or not source:
        raise DataError(
            f"unknown text source {source!r}: neither a folder here nor one of {listing(NAMED_SOURCES)}."
            f"{did_you_mean(source, NAMED_SOURCES)} Remedy: use one of these names, or the path of a folder."
        )
    raise DataError(f"text source {source!r}: this folder does not exist. Remedy: check the path.")


def _read(folder: Path, patterns: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Returns every non-empty file below ``folder`` whose name matches, sorted by relative POSIX path."""
    paths = sorted(_matching(folder, patterns), key=lambda found: found[0])
    documents = [(relative, content) for relative, path in paths if (content := path.read_bytes())]
    if not documents:
        found = "every matching file is empty" if paths else "no file matches"
        raise DataError(
            f"text source {str(folder)!r}: {found} (patterns: {listing(patterns)}; subfolders were searched, hidden "
            "ones were not). Remedy: pass patterns=(...) that match your files."
        )
    return documents


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield ``(relative POSIX path, path)`` of each file below ``folder`` whose name matches a pattern, unsorted."""
    # By default os.walk skips folders that it cannot list, and a text without a subfolder would look complete.
    for parent, folders, names in os.walk(folder, onerror=_reraise):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and any(fnmatchcase(name, p) for p in patterns) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _reraise(error: OSError) -> None:
    raise error


def _is_heldout(path: str, fraction: float, seed: int) -> bool:
    """Whether to hold out the file at this relative path; depends only on the arguments, not on machine or run."""
    # Not hash(): Python salts it per process. surrogateescape: a path on disk need not be valid Unicode.
    digest = hashlib.sha256(f"{seed}:{path}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def _joined(documents: list[bytes]) -> np.ndarray:
    """Join the documents with separators into one uint8 array [n]; it is read-only because it views bytes."""
    return np.frombuffer(SEPARATOR.join(documents), np.uint8)


_SYNTHETIC_DOCUMENTS = 256
_SYNTHETIC_BYTES = 4096  # of each document
_SYNTHETIC_WORDS = 96
# Cumulative probabilities of a word's first three successors; the fourth has the rest. This gives about 1.1 nats per
# word, far less than a model without context sees in its letters.
_SUCCESSOR_BOUNDS = (0.55, 0.80, 0.93)


def _synthetic(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``(path, content)`` of each generated document: sentences from one random first-order chain over words."""
    # Only Random.random(): Python guarantees its sequence for a given seed, unlike that of Random.choice or of numpy's
    # generators. The seed is a string because Random(-1) equals Random(1).
    draw = Random(f"jaxpar synthetic text {seed}").random
    letters = "etaoinshrdlu"
    words = ["".join(letters[int(draw() * len(letters))] for _ in range(2 + i % 6)) for i in range(_SYNTHETIC_WORDS)]
    written = [word + (".\n" if i % 12 == 0 else " ") for i, word in enumerate(words)]
    successors = [[int(draw() * len(words)) for _ in range(len(_SUCCESSOR_BOUNDS) + 1)] for _ in words]
    for document in range(_SYNTHETIC_DOCUMENTS):
        state = int(draw() * len(words))
        pieces: list[str] = []
        size = 0
        while size < _SYNTHETIC_BYTES:
            pieces.append(written[state])
            size += len(written[state])
            state = successors[state][bisect(_SUCCESSOR_BOUNDS, draw())]
        yield f"{document:03d}.txt", "".join(pieces).encode("ascii")[:_SYNTHETIC_BYTES]
