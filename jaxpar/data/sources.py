"""``load_text``: a text as tokens, split into a training part and a held-out part.

>>> from jaxpar.data import load_text
>>> text = load_text("synthetic")
>>> text.vocab, text.documents, text.train.dtype.name
(256, 256, 'uint8')
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.data.bad_rows import BadRow, BadRows
from jaxpar.data.documents import Document, DocumentFiles, ReadOptions, find_documents
from jaxpar.data.megatron import MegatronDataset, check_largest, megatron_prefix, read_megatron
from jaxpar.data.token_file import TokenFile, is_token_file
from jaxpar.data.tokenizer import ByteTokenizer, Tokenizer, id_dtype
from jaxpar.errors import DataError

_DEFAULT = ReadOptions()
# Documents encoded in one call: enough for all cores, and little memory.
_MOST_DOCUMENTS, _MOST_BYTES = 1024, 1 << 22


@dataclass(frozen=True, eq=False)
class Text:
    """A text, split into a training part and a held-out part. A token ends each document.

    Attributes:
        name: name of the source: ``"stdlib"``, ``"synthetic"``, or that of the folder or file.
        train: training tokens, ``[n]``, read-only.
        heldout: held-out tokens, ``[m]``, read-only.
        vocab: number of possible tokens: 256 for bytes.
        documents: total number of documents, held-out ones included.
        heldout_documents: number of held-out documents.
        unit: what a document is: ``files`` or ``rows``.
        train_starts, heldout_starts: offset of each document of a part, and the end of the last, ``[documents + 1]``.
        eos: the token that ends a document: 0 for bytes; ``None`` if it is not known.
        bad: the rows that were left out, in words; empty if there are none.
        checksum: identifies the tokens of a token file; ``None`` for a text that was tokenized now.

    >>> text = load_text("synthetic")
    >>> text.name, text.train.dtype, text.vocab
    ('synthetic', dtype('uint8'), 256)
    """

    name: str
    train: np.ndarray
    heldout: np.ndarray
    vocab: int
    documents: int
    heldout_documents: int
    train_starts: np.ndarray
    heldout_starts: np.ndarray
    unit: str = "files"
    eos: int | None = 0
    bad: str = ""
    checksum: str | None = None


def load_text(
    source: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    options: ReadOptions = _DEFAULT,
    heldout_fraction: float = 0.05,
    seed: int = 0,
) -> Text:
    """Returns a text as tokens, split document by document into training and held-out parts.

    A document is held out when the hash of ``seed`` and of its key falls in the lowest ``heldout_fraction`` of the
    hash's range. The key is the file's path relative to the folder, and for a row the row's number too. No other
    document affects this, so adding or removing files never moves a document between the parts. The fraction counts
    documents, not tokens, and is met on average. A single file of plain text is cut in two at the end of a line.

    Non-empty documents are joined by ``eos``, in sorted order of the relative paths of their files.

    Args:
        source: one of

            - ``"stdlib"``: every ``*.py`` of the running interpreter's library, without installed packages (some
              distributions leave out the large ``test`` package);
            - ``"synthetic"``: 1 MiB of sentences generated from ``seed``, in which the next word depends on the current
              one;
            - a folder, searched recursively; write ``"./stdlib"`` for a folder of that name. Hidden files and folders
              are skipped, and symbolic links to folders are not followed;
            - a file, also one of :func:`jaxpar.data.write_tokens`, which is mapped into memory as it was written;
            - the prefix of Megatron's ``.bin`` and ``.idx`` files. They are mapped too; the last documents are held
              out, and without a tokenizer the vocabulary is found by reading all tokens.
        tokenizer: of :func:`jaxpar.data.load_tokenizer`; by default bytes, or for a token file its own.
        options: formats of the files, and what to do with rows that have no text.
        heldout_fraction: expected fraction of the documents to hold out, strictly between 0 and 1.
        seed: determines the held-out documents and the words of the synthetic text.

    Returns:
        The text; see :class:`Text` for shapes.

    Raises:
        DataError: the source is unknown, no file matches, a row has no text, the fraction is not between 0 and 1, the
            split leaves one part without documents, or a token file is of another tokenizer.
        OSError: a file or folder cannot be read.

    >>> text = load_text("synthetic", heldout_fraction=0.1)
    >>> text.train.size + text.heldout.size, text.heldout_documents
    (1048830, 28)
    """
    if is_token_file(source):
        return _mapped(TokenFile(source), tokenizer)
    check_fraction(heldout_fraction)
    if prefix := megatron_prefix(source):
        return _of_megatron(read_megatron(prefix), tokenizer, heldout_fraction)
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    files, bad = find_documents(source, options, seed), BadRows(options.bad_rows)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for document in split_documents(files, bad, tokenizer, fraction=heldout_fraction, seed=seed):
        parts[document.heldout].append(document.ids)
    train, heldout = parts[False], parts[True]
    check_parts(files.name, len(train), len(heldout), fraction=heldout_fraction, seed=seed, unit=files.unit)
    dtype = id_dtype(tokenizer.vocab)
    return Text(
        files.name,
        _joined(train, dtype),
        _joined(heldout, dtype),
        vocab=tokenizer.vocab,
        documents=len(train) + len(heldout),
        heldout_documents=len(heldout),
        train_starts=_starts(train),
        heldout_starts=_starts(heldout),
        unit=files.unit,
        eos=tokenizer.eos,
        bad=bad.describe(),
    )


def _mapped(file: TokenFile, tokenizer: Tokenizer | None) -> Text:
    """The text of a token file."""
    header = file.header
    if tokenizer is not None:
        file.check_tokenizer(tokenizer)
    return Text(
        header.name,
        file.train,
        file.heldout,
        vocab=header.vocab,
        documents=header.train.documents + header.heldout.documents,
        heldout_documents=header.heldout.documents,
        train_starts=file.train_starts,
        heldout_starts=file.heldout_starts,
        unit=header.unit,
        eos=header.eos,
        bad=header.bad,
        checksum=header.checksum,
    )


def _of_megatron(dataset: MegatronDataset, tokenizer: Tokenizer | None, fraction: float) -> Text:
    """The text of Megatron's files, whose last documents are held out, as Megatron splits them."""
    count = len(dataset.starts) - 1
    heldout = min(count - 1, max(1, round(count * fraction)))
    check_parts(dataset.prefix.name, count - heldout, heldout, fraction=fraction, seed=0, unit="documents")
    at = count - heldout
    start = int(dataset.starts[at])
    return Text(
        dataset.prefix.name,
        dataset.tokens[:start],
        dataset.tokens[start:],
        vocab=check_largest(dataset, None if tokenizer is None else tokenizer.vocab),
        documents=count,
        heldout_documents=heldout,
        train_starts=dataset.starts[: at + 1],
        heldout_starts=dataset.starts[at:] - start,
        unit="documents",
        eos=None if tokenizer is None else tokenizer.eos,
        checksum=dataset.checksum,
    )


class EncodedDocument(NamedTuple):
    """The ids [n] of a document, its ``eos`` included, and whether it is held out."""

    ids: np.ndarray
    heldout: bool


def split_documents(
    files: DocumentFiles,
    bad: BadRows,
    tokenizer: Tokenizer,
    *,
    fraction: float,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> Iterator[EncodedDocument]:
    """Yields all documents of a source as ids, in their order.

    Args:
      files: the source.
      bad: counts documents without text, or raises an error.
      tokenizer: makes the ids.
      fraction, seed: which documents are held out; see :func:`load_text`.
      progress: called with the number of bytes of the files that are read.

    Raises:
      DataError: as :meth:`DocumentFiles.read`; or a file is no UTF-8, which a tokenizer other than bytes needs.
    """
    documents: Iterable[Document] = files.read(bad, progress)
    if len(files.files) == 1 and files.format == "text":
        documents = _halves(documents, fraction)
        held_out = lambda document: document.key == _TAIL
    else:
        held_out = lambda document: is_heldout(document.key, fraction, seed)
    if not isinstance(tokenizer, ByteTokenizer):
        documents = _only_utf8(documents, bad)
    for batch in _batched(documents):
        ids = tokenizer.encode([document.content for document in batch])
        for document, found in zip(batch, ids, strict=True):
            yield EncodedDocument(found, held_out(document))


_TAIL = "tail"


def _halves(documents: Iterable[Document], fraction: float) -> Iterator[Document]:
    """The beginning and the end of a single document, cut at the end of a line where there is one."""
    for _, content, place in documents:
        at = max(1, int(len(content) * (1 - fraction)))
        at = content.rfind(b"\n", 0, at) + 1 or at
        yield Document("head", content[:at], place)
        if content[at:]:
            yield Document(_TAIL, content[at:], place)


def _only_utf8(documents: Iterable[Document], bad: BadRows) -> Iterator[Document]:
    for document in documents:
        try:
            document.content.decode()
        except UnicodeDecodeError as error:
            bad.add(document.place, BadRow(f"byte {error.start} is not valid UTF-8", "save the file as UTF-8"))
        else:
            yield document


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if len(batch) == _MOST_DOCUMENTS or size >= _MOST_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_fraction(fraction: float) -> None:
    """Raise a DataError unless the held-out fraction is strictly between 0 and 1."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"heldout_fraction must be strictly between 0 and 1, got {fraction}.")


def check_parts(name: str, train: int, heldout: int, *, fraction: float, seed: int, unit: str) -> None:
    """Raise a DataError if one of the parts has no documents."""
    if not train or not heldout:
        raise DataError(
            f"text {name!r}: the split left {train} training and {heldout} held-out {unit} of {train + heldout} "
            f"(heldout_fraction={fraction}, seed={seed}), and both parts need at least one. Remedy: "
            f"{'raise' if train else 'lower'} heldout_fraction, change seed, or split the text into more {unit}."
        )


def is_heldout(key: str, fraction: float, seed: int) -> bool:
    """Whether to hold out the document with this key; depends only on the arguments, not on machine or run."""
    # Not hash(): Python salts it per process. surrogateescape: a path on disk need not be valid Unicode.
    digest = hashlib.sha256(f"{seed}:{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def _starts(documents: list[np.ndarray]) -> np.ndarray:
    """The offset of each document, and the end of the last, which has no ``eos``."""
    starts = np.cumsum([0, *map(len, documents)])
    starts[-1] -= 1
    return starts


def _joined(documents: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Join the documents into one array [n], without the ``eos`` of the last."""
    array = np.concatenate(documents, dtype=dtype)[:-1]
    array.flags.writeable = False
    return array
