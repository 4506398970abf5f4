"""The configuration of a run's data: frozen dataclasses that are built from YAML with strict checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxpar.app.config_ranges import BatchSize, Positive
from jaxpar.data.documents import ReadOptions
from jaxpar.data.tokenizer import TokenizerConfig
from jaxpar.errors import ConfigError
from jaxpar.utils.checks import Range


@dataclass(frozen=True)
class BlendSource:
    """One of several sources of text.

    Attributes:
      source: as ``data.source``.
      weight: its share of the rows; the weights need not sum to 1.
      format, text_field, bad_rows, patterns: how files are read (:class:`jaxpar.data.ReadOptions`).
    """

    source: str
    weight: Positive = 1.0
    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = "auto"
    text_field: str = "text"
    bad_rows: Literal["error", "skip"] = "error"
    patterns: tuple[str, ...] | None = None

    @property
    def read_options(self) -> ReadOptions:
        """How the files are read."""
        return ReadOptions(self.format, self.text_field, self.bad_rows, self.patterns)


@dataclass(frozen=True)
class DataConfig:
    """The data to train on: a text, cut into batches of ``batch`` sequences of ``seq`` tokens; or data of your own.

    Attributes:
      source: ``stdlib``, ``synthetic``, or a folder or file of text, relative to the current directory.
      blend: instead of ``source``, several sources: ``[{source: books, weight: 3}, {source: code, weight: 1}]``.
      tokenizer: a ``tokenizer.json``, or ``{file, eos, special}`` (:class:`jaxpar.data.TokenizerConfig`); by default a
        token is a byte.
      format, text_field, bad_rows, patterns: how files are read (:class:`jaxpar.data.ReadOptions`).
      heldout_fraction: the fraction of the documents that is held out for evaluation.
      chat_template: a chat template, or the ``tokenizer.json`` beside which it is; see
        :func:`jaxpar.data.load_chat_template`. The rows of the source are then conversations, with a loss on answers
        only.
      factory: instead of a text, ``module:function`` that returns the data (:class:`jaxpar.app.own_data.OwnData`).
      args: keyword arguments of the factory.
      dims: the logical dims of the batch's arrays, such as ``{image: [batch, height, width, channels]}``; without them
        they are found from the loss.
      batch: rows of a batch, over all devices.
      seq: tokens of a row.
      seed: determines the order of the rows.
      packing: ``false``: a row is a window of the text, and tokens attend across documents. ``true``: a token attends
        only to tokens of its own document. ``documents``: also, rows hold whole documents, as many as fit.
        ``padded``: a row holds one document. With ``chat_template``, ``documents`` packs whole conversations.
    """

    source: str = "stdlib"
    blend: tuple[BlendSource, ...] = ()
    tokenizer: str | TokenizerConfig | None = None
    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = "auto"
    text_field: str = "text"
    bad_rows: Literal["error", "skip"] = "error"
    patterns: tuple[str, ...] | None = None
    heldout_fraction: Annotated[float, Range(0, 0.999, above=True)] = 0.05
    chat_template: str | None = None
    factory: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    dims: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    batch: BatchSize = 32
    seq: Annotated[int, Range(1, 2**24)] = 128
    seed: int = 0
    packing: bool | Literal["documents", "padded"] = False

    @property
    def sources(self) -> tuple[BlendSource, ...]:
        """The sources of a blend, or the only source."""
        options = (self.format, self.text_field, self.bad_rows, self.patterns)
        return self.blend or (BlendSource(self.source, 1.0, *options),)


def check_blend(data: DataConfig, file: Path) -> None:
    """Raises an error if a blend and keys of a single source are both set."""
    for key in ("source", "format", "text_field", "bad_rows", "patterns") if data.blend else ():
        if getattr(data, key) != getattr(DataConfig(), key):
            raise ConfigError(
                f"{file}: data.{key} and data.blend are mutually exclusive: each source of a blend has its own. "
                f"Remedy: blend: [{{{key}: ...}}]."
            )
