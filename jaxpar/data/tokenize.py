"""``write_tokens``: tokenize a text once, into a token file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.data.bad_rows import BadRows
from jaxpar.data.documents import ReadOptions, find_documents
from jaxpar.data.sources import check_fraction, check_parts, split_documents
from jaxpar.data.token_file import PartSize, TokenFile, TokenFileWriter, TokenHeader
from jaxpar.data.tokenizer import ByteTokenizer, Tokenizer, id_dtype

_DEFAULT = ReadOptions()
# Texts of the header, which has a fixed size.
_MOST_BAD, _MOST_NAME = 1000, 500


@dataclass(frozen=True)
class TokenizeProgress:
    """How far :func:`write_tokens` is.

    Attributes:
      bytes, of_bytes: of the source's files that are read, and their total; the second is 0 for ``synthetic``.
      documents, tokens: written so far.
    """

    bytes: int
    of_bytes: int
    documents: int
    tokens: int


def write_tokens(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    options: ReadOptions = _DEFAULT,
    heldout_fraction: float = 0.05,
    seed: int = 0,
    progress: Callable[[TokenizeProgress], object] | None = None,
) -> TokenFile:
    """Tokenize a text into a token file, which :func:`jaxpar.data.load_text` maps into memory.

    The file holds what ``load_text`` returns for the same arguments. It appears under its name when it is complete.

    Args:
      source: as for ``load_text``.
      out: the file to write.
      tokenizer, options, heldout_fraction, seed: as for ``load_text``.
      progress: called after each document.

    Returns:
      The file, opened.

    Raises:
      DataError: as ``load_text``; or the file exists or cannot be written.
      OSError: a file of the source cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = write_tokens("synthetic", f"{folder}/synthetic.tokens")
    ...     file.header.train
    PartSize(tokens=1007861, documents=246)
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    check_fraction(heldout_fraction)
    files, bad = find_documents(source, options, seed), BadRows(options.bad_rows)
    read, tokens, count = 0, 0, 0

    def reading(position: int) -> None:
        nonlocal read
        read = position

    with TokenFileWriter(out, id_dtype(tokenizer.vocab)) as writer:
        documents = split_documents(files, bad, tokenizer, fraction=heldout_fraction, seed=seed, progress=reading)
        for count, document in enumerate(documents, 1):
            writer.add(document.ids, heldout=document.heldout)
            tokens += len(document.ids)
            if progress is not None:
                progress(TokenizeProgress(read, files.bytes, count, tokens))
        held = writer.documents(heldout=True)
        check_parts(files.name, count - held, held, fraction=heldout_fraction, seed=seed, unit=files.unit)

        def header(train: PartSize, heldout: PartSize, checksum: str) -> TokenHeader:
            return TokenHeader(
                name=files.name,
                unit=files.unit,
                vocab=tokenizer.vocab,
                eos=tokenizer.eos,
                tokenizer=tokenizer.name[-_MOST_NAME:],
                digest=tokenizer.digest,
                dtype=id_dtype(tokenizer.vocab).name,
                train=train,
                heldout=heldout,
                checksum=checksum,
                bad=bad.describe()[:_MOST_BAD],
            )

        return writer.finish(header)
