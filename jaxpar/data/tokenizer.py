"""Tokenizers: bytes, or a ``tokenizer.json`` of the package ``tokenizers``.

>>> from jaxpar.data.tokenizer import load_tokenizer
>>> tokenizer = load_tokenizer()
>>> tokenizer.name, tokenizer.vocab, tokenizer.eos, tokenizer.encode_prompt("hi")
('bytes', 256, 0, [104, 105])
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxpar.errors import DataError, did_you_mean, listing
from jaxpar.utils.checks import INT32, shown
from jaxpar.utils.durable import read_input
from jaxpar.utils.extras import import_extra

BYTES = 256
_MOST_BYTES = 1 << 30
"""Number of tokens without a tokenizer: text is bytes."""
SEPARATOR = 0
"""The byte that ends a document. Text hardly ever contains it."""
_KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""Names of the token that ends a text, in the order in which they are looked up."""


@dataclass(frozen=True)
class TokenizerConfig:
    """A ``tokenizer.json``, and how it is used.

    Attributes:
      file: path of the file.
      eos: the token that ends a document, such as ``</s>``. By default ``eos_token`` of the ``tokenizer_config.json``
        beside the file, else a token with one of the usual names.
      special: ``text`` reads the name of a special token inside a document as ordinary text; ``parse`` reads it as
        that token, which is for documents that were rendered with a chat template. These hold their special tokens, so
        that the post-processor adds none.
    """

    file: str
    eos: str | None = None
    special: Literal["text", "parse"] = "text"


class TextDecoder(Protocol):
    """Turns tokens into text, one token at a time."""

    def add(self, token: int) -> str:
        """Returns the text that this token completes; empty in the middle of a character."""

    def end(self) -> str:
        """Returns the rest, with U+FFFD for an incomplete character."""


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    Attributes:
      name: ``bytes``, or the file.
      vocab: number of ids; each id is below it.
      eos: the id that ends a document.
      digest: a hash of everything that determines the ids.
      special_tokens: names that are one token each in a rendered conversation.
    """

    name: str
    vocab: int
    eos: int
    digest: str
    special_tokens: tuple[str, ...]

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids [n] of each document of UTF-8 text, ``eos`` included."""

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of the beginning of a document."""

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids [n] of a rendered conversation, to which nothing is added, and where each begins in it."""

    def decoder(self) -> TextDecoder:
        """Returns a decoder for one text."""


def load_tokenizer(config: str | os.PathLike[str] | TokenizerConfig | None = None) -> Tokenizer:
    """Returns a tokenizer: that of a ``tokenizer.json``, or bytes.

    Args:
      config: the file, or the file with options; ``None`` for bytes.

    Raises:
      DataError: there is no such file, it is not a tokenizer, or its token that ends a document is not known.
      MissingExtraError: the package ``tokenizers`` is not installed.
    """
    if config is None:
        return ByteTokenizer()
    return FileTokenizer(config if isinstance(config, TokenizerConfig) else TokenizerConfig(os.fspath(config)))


def id_dtype(vocab: int) -> np.dtype[Any]:
    """Returns the smallest dtype that holds the ids: uint8, uint16 or int32.

    >>> [id_dtype(vocab).name for vocab in (256, 50_257, 128_256)]
    ['uint8', 'uint16', 'int32']
    """
    return np.dtype(np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.int32)


class ByteTokenizer:
    """Text as its UTF-8 bytes; byte 0 ends a document.

    >>> ByteTokenizer().encode([b"ab"])[0].tolist()
    [97, 98, 0]
    """

    name, vocab, eos, digest = "bytes", BYTES, SEPARATOR, "bytes"
    special_tokens: tuple[str, ...] = ("\0",)

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the bytes of each document, and byte 0."""
        return [np.frombuffer(document + bytes([SEPARATOR]), np.uint8) for document in documents]

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode())

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of a text, and the position of the character of each."""
        starts = [i for i, character in enumerate(text) for _ in character.encode()]
        return np.frombuffer(text.encode(), np.uint8), np.asarray(starts, np.int64)

    def decoder(self) -> TextDecoder:
        """Returns a decoder for one text."""
        return _ByteDecoder()


class FileTokenizer:
    """The tokenizer of a ``tokenizer.json``; :func:`load_tokenizer` makes it.

    Its own post-processor adds what it adds for any text, such as a token at the beginning, except to rendered text.
    Truncation and padding that the file asks for are turned off.

    Raises:
      DataError: as :func:`load_tokenizer`.
      MissingExtraError: the package ``tokenizers`` is not installed.
    """

    def __init__(self, config: TokenizerConfig):
        file = Path(config.file).expanduser()
        content = _read(file)
        self.name = str(file)
        self._inner = _parsed(file, content)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._rendered = config.special == "parse"
        self._inner.encode_special_tokens = not self._rendered
        ids = self._inner.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so their number is not what an embedding needs.
        self.vocab = max(ids.values(), default=-1) + 1
        if self.vocab > INT32:
            name = max(ids, key=ids.__getitem__)
            raise DataError(
                f"tokenizer {str(file)!r}: the token {shown(name)} has the id {ids[name]}, but ids are below {INT32}, "
                "because batches hold them as int32. Remedy: a tokenizer whose ids are consecutive."
            )
        self.eos = _eos(file, config.eos, ids)
        digest = hashlib.sha256(content)
        digest.update(f"eos {self.eos} special {'rendered' if self._rendered else config.special}".encode())
        self.digest = f"sha256:{digest.hexdigest()[:32]}"
        self._dtype = id_dtype(self.vocab)
        added = self._inner.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each document, encoded on all cores, each with ``eos`` at its end."""
        texts = [document.decode() for document in documents]
        found = []
        for encoded in self._inner.encode_batch_fast(texts, add_special_tokens=not self._rendered):
            ids = encoded.ids
            ended = ids if ids and ids[-1] == self.eos else [*ids, self.eos]
            found.append(np.asarray(ended, self._dtype))
        return found

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text, without those that the post-processor adds at its end."""
        encoded = self._inner.encode(text, add_special_tokens=not self._rendered)
        added = encoded.special_tokens_mask
        end = next((end for end in range(len(added), 0, -1) if not added[end - 1]), 0)
        return list(encoded.ids[:end])

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids [n] of a rendered conversation, special tokens by their names, and where each begins."""
        encoded = self._parsing.encode(text, add_special_tokens=False)
        starts = np.asarray([start for start, _ in encoded.offsets], np.int64)
        return np.asarray(encoded.ids, self._dtype), starts

    @cached_property
    def _parsing(self) -> Any:
        """The tokenizer, but for text in which the names of special tokens are these tokens."""
        found = type(self._inner).from_str(self._inner.to_str())
        found.encode_special_tokens = False
        return found

    def decoder(self) -> TextDecoder:
        """Returns a decoder for one text. Special tokens have no text."""
        return _IdDecoder(self._inner)


class _ByteDecoder:
    def __init__(self) -> None:
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._reader.decode(bytes([token])) if token < BYTES else "\ufffd"

    def end(self) -> str:
        return self._reader.decode(b"", final=True)


class _IdDecoder:
    """Decodes a growing list of ids. The text of an id may depend on its left neighbor, so one is decoded again."""

    def __init__(self, inner: Any):
        self._inner, self._ids = inner, list[int]()
        self._context = 0  # the first id that is decoded
        self._settled = 0  # the number of ids whose text was returned

    def add(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._text(self._settled), self._text(len(self._ids))
        if now.endswith("\ufffd"):  # the middle of a character
            return ""
        self._context, self._settled = self._settled, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        before, now = self._text(self._settled), self._text(len(self._ids))
        self._context = self._settled = len(self._ids)
        return now[len(before) :]

    def _text(self, stop: int) -> str:
        return str(self._inner.decode(self._ids[self._context : stop], skip_special_tokens=True))


def _read(file: Path) -> bytes:
    try:
        return read_input(file, _MOST_BYTES)
    except OSError as error:
        folder = file / "tokenizer.json"
        remedy = f"pass {str(folder)!r}" if os.path.isfile(folder) else "the path of a tokenizer.json"
        raise DataError(f"tokenizer {str(file)!r} cannot be read: {error.strerror}. Remedy: {remedy}.") from error


def _parsed(file: Path, content: bytes) -> Any:
    tokenizers = import_extra("tokenizers", "text", f"the tokenizer {file.name}")
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no narrower class
        raise DataError(
            f"tokenizer {str(file)!r} is not a tokenizer.json: {error}. Remedy: the file that the package tokenizers "
            "or transformers saves under this name."
        ) from error


def _eos(file: Path, given: str | None, ids: dict[str, int]) -> int:
    """Returns the id that ends a document."""
    name = given or _configured_eos(file.with_name("tokenizer_config.json"))
    if name is None:
        name = next((known for known in _KNOWN_EOS if known in ids), None)
    if name is None:
        raise DataError(
            f"tokenizer {str(file)!r} does not say which token ends a document, and has none of {listing(_KNOWN_EOS)}. "
            "Remedy: tokenizer: {file: tokenizer.json, eos: '</s>'} with the name of its token."
        )
    if name not in ids:
        raise DataError(
            f"tokenizer {str(file)!r} has no token {name!r} to end a document.{did_you_mean(name, ids)} Remedy: eos: "
            "the name of a token in its vocabulary."
        )
    return ids[name]


def _configured_eos(file: Path) -> str | None:
    """``eos_token`` of a ``tokenizer_config.json``; ``None`` without such a file or token."""
    try:
        token = json.loads(read_input(file, _MOST_BYTES))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
