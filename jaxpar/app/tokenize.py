"""``jaxpar tokenize`` and ``jaxpar verify-tokens``: write a token file once, and check its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from jaxpar.errors import ConfigError

if TYPE_CHECKING:
    from jaxpar.app.data_config import DataConfig
    from jaxpar.data.token_file import TokenFile
    from jaxpar.data.tokenize import TokenizeProgress


@dataclass(frozen=True)
class TokenizeCommand:
    """Tokenize a text once: OUT is a memory-mapped file for data.source. SOURCE is a text, or a run's YAML file.

    Attributes:
      source: as data.source: a folder, a file, stdlib or synthetic; or a YAML file whose data section is used
      out: file to write
      set: with a YAML file: change one key, such as data.source=corpus
      tokenizer: a tokenizer.json (default: bytes)
      eos: the token that ends a document (default: that of tokenizer_config.json, or a usual name)
      special: how names of special tokens inside a document are read
      format: format of the files; auto follows their names
      text_field: the field of a row that holds its text
      bad_rows: what to do with rows without text
      heldout_fraction: fraction of the documents to hold out
    """

    source: Annotated[str, Positional, arg(metavar="SOURCE")]
    out: Annotated[Path, Positional, arg(metavar="OUT")]
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    tokenizer: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    eos: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None
    special: Literal["text", "parse"] = "text"
    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = "auto"
    text_field: str = "text"
    bad_rows: Literal["error", "skip"] = "error"
    heldout_fraction: float = 0.05

    def run(self) -> int:
        from jaxpar.data.tokenize import write_tokens
        from jaxpar.data.tokenizer import load_tokenizer

        data = self._data()
        (source, *others) = data.sources
        if others:
            raise ConfigError("tokenize: data.blend has several sources. Remedy: tokenize each, and blend the files.")
        with _bar() as progress:
            found = write_tokens(
                source.source,
                self.out,
                tokenizer=load_tokenizer(data.tokenizer),
                options=source.read_options,
                heldout_fraction=data.heldout_fraction,
                progress=progress,
            )
        print(f"{self.out}: {_line(found)}")
        return 0

    def _data(self) -> DataConfig:
        from jaxpar.app.config import load_run
        from jaxpar.app.data_config import DataConfig
        from jaxpar.data.tokenizer import TokenizerConfig

        if Path(self.source).suffix in (".yaml", ".yml"):
            return load_run(self.source, self.set).config.data
        tokenizer = None if self.tokenizer is None else TokenizerConfig(self.tokenizer, self.eos, self.special)
        own: dict[str, Any] = {name: getattr(self, name) for name in ("format", "text_field", "bad_rows")}
        return DataConfig(self.source, tokenizer=tokenizer, heldout_fraction=self.heldout_fraction, **own)


@dataclass(frozen=True)
class VerifyTokensCommand:
    """Check every byte of a token file against its checksum; exit 1 on a mismatch.

    Attributes:
      file: a file of jaxpar tokenize
    """

    file: Annotated[Path, Positional, arg(metavar="FILE")]

    def run(self) -> int:
        from jaxpar.data.token_file import TokenFile

        found = TokenFile(self.file)
        found.verify()
        print(f"{self.file}: {_line(found)}; all bytes match the checksum")
        return 0


def _line(file: TokenFile) -> str:
    header = file.header
    tokens = header.train.tokens + header.heldout.tokens
    documents = header.train.documents + header.heldout.documents
    held = f"{header.heldout.documents:,} of {documents:,} {header.unit} held out"
    text = f"{tokens:,} tokens ({header.dtype}, {header.bytes / 2**20:.1f} MiB) of {header.tokenizer}; {held}"
    return f"{text}; {header.bad}" if header.bad else text


@contextmanager
def _bar() -> Iterator[Callable[[TokenizeProgress], None] | None]:
    """A progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokenize", total=None)

        def show(at: TokenizeProgress) -> None:
            text = f"{at.documents:,} documents, {at.tokens:,} tokens"
            progress.update(task, total=at.of_bytes or None, completed=at.bytes, description=text)

        yield show
