"""The text of a run: its sources, and the rows that batches are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxpar.data.blend import Blend
from jaxpar.data.entropy import MAX_BIGRAM_VOCAB, bigram_entropy
from jaxpar.data.packing import DocumentRows
from jaxpar.data.sources import Text, load_text
from jaxpar.data.windows import RowSource, Windows
from jaxpar.errors import DataError

if TYPE_CHECKING:
    from jaxpar.app.data_config import DataConfig
    from jaxpar.data.tokenizer import Tokenizer

type TextPart = Literal["train", "heldout"]


@dataclass(frozen=True)
class RunText:
    """The sources of a run's text.

    Attributes:
      config: the configuration of the data.
      texts: the text of each source.
    """

    config: DataConfig
    texts: tuple[Text, ...]

    @property
    def vocab(self) -> int:
        """Number of possible tokens."""
        return self.texts[0].vocab

    @property
    def eos(self) -> int | None:
        """The token that ends a document, if it is known."""
        return self.texts[0].eos

    def rows(self, part: TextPart) -> RowSource:
        """Returns the rows of a part, as ``data.packing`` cuts them.

        Raises:
          DataError: a source has no rows.
        """
        found = [self._rows(text, part) for text in self.texts]
        if not self.config.blend:
            return found[0]
        names = [f"{source.source} ({part})" for source in self.config.blend]
        return Blend(names, found, [source.weight for source in self.config.blend])

    def _rows(self, text: Text, part: TextPart) -> RowSource:
        tokens: np.ndarray = getattr(text, part)
        packing, seq = self.config.packing, self.config.seq
        if packing is True and text.eos is None:
            raise DataError(
                f"data.packing: true finds documents by the token that ends them, which {text.name} does not say. "
                "Remedy: packing: documents, or data.tokenizer."
            )
        if isinstance(packing, bool):
            return Windows(tokens, seq, text.eos if packing else None, text.checksum, text.vocab)
        starts = getattr(text, f"{part}_starts")
        return DocumentRows(tokens, starts, seq, packing == "padded", text.checksum, text.vocab)

    def describe(self) -> str:
        """Returns a line about the text and its batches."""
        lines = []
        for text, source in zip(self.texts, self.config.sources, strict=True):
            share = f" (weight {source.weight:g})" if self.config.blend else ""
            lines.append(
                f"{text.name}{share}: {text.train.size:,} tokens to train on, {text.heldout.size:,} held out "
                f"({text.heldout_documents} of {text.documents} {text.unit})"
            )
        lines.append(f"batch {self.config.batch} × {self.config.seq} tokens")
        rows = self.rows("train")
        if isinstance(rows, DocumentRows):
            lines.append(f"{rows.count:,} rows, {rows.density:.1%} full")
        return "; ".join([*lines, *(text.bad for text in self.texts if text.bad)])

    def bigram(self) -> float:
        """The bigram entropy of the held-out text; NaN for several sources, or if its table would be too large."""
        (text, *others) = self.texts
        return float("nan") if others or text.vocab > MAX_BIGRAM_VOCAB else bigram_entropy(text.heldout, text.vocab)


def load_run_text(config: DataConfig, tokenizer: Tokenizer | None) -> RunText:
    """Returns the text that a configuration names.

    Args:
      config: the configuration of the data.
      tokenizer: its tokenizer; ``None`` for bytes, or for token files of any tokenizer.

    Raises:
      DataError: as :func:`jaxpar.data.load_text`; or the sources of a blend have different tokens.
    """
    load = partial(load_text, tokenizer=tokenizer, heldout_fraction=config.heldout_fraction)
    texts = tuple(load(source.source, options=source.read_options) for source in config.sources)
    first = texts[0]
    for text in texts[1:]:
        if (text.vocab, text.eos) != (first.vocab, first.eos):
            raise DataError(
                f"blend: {text.name} has {text.vocab} tokens, of which {text.eos} ends a document, but {first.name} "
                f"has {first.vocab} and {first.eos}. Remedy: one tokenizer for all sources."
            )
    return RunText(config, texts)
