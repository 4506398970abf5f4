"""``RunData``: the batches of a run, from a text or from data of the user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

import jaxpar as jp
from jaxpar.app.job import Job
from jaxpar.data import Text, batches, bigram_entropy, eval_batches, load_text
from jaxpar.data.entropy import MAX_BIGRAM_VOCAB
from jaxpar.data.loader import Stream


@dataclass(frozen=True)
class RunData:
    """The batches of one process.

    Attributes:
      stream: batches to train on.
      heldout: batches to evaluate on; empty if nothing is held out.
      title, line: what kind of data it is, and a line about it.
      bigram: the bigram entropy of the held-out text, in nats per token; NaN without a text.
    """

    stream: Stream
    heldout: list[Any]
    title: str
    line: str
    bigram: float = math.nan


def open_data(job: Job, layout: jp.Layout) -> RunData:
    """Returns the batches of this process, with those for evaluation.

    Raises:
      ConfigError: the vocabulary of the model is smaller than that of the tokenizer.
      DataError: the data does not fit the batch, or cannot be read.
    """
    config, process = job.config, _process()
    if job.data is not None:
        heldout = job.data.heldout(config.train.eval_batches, **process)
        return RunData(job.data.stream(**process), heldout, "data", job.data.describe())
    text = _text(job)
    cut: dict[str, Any] = {"batch": config.data.batch, "seq": config.data.seq, **process, **job.reading(layout)}
    line = (
        f"{text.name}: {text.train.size:,} tokens to train on, {text.heldout.size:,} held out "
        f"({text.heldout_documents} of {text.documents} {text.unit}); batch {config.data.batch} × {config.data.seq} "
        f"tokens{text.bad and '; '}{text.bad}"
    )
    heldout = eval_batches(text.heldout, max_batches=config.train.eval_batches, **cut)
    stream = batches(text.train, seed=config.data.seed, **cut)
    return RunData(stream, heldout, "text", line, _bigram(text))


def global_stream(job: Job, layout: jp.Layout) -> Stream:
    """Returns the training batches with the rows of all processes."""
    if job.data is not None:
        return job.data.stream()
    data = job.config.data
    cut: dict[str, Any] = {"batch": data.batch, "seq": data.seq, "seed": data.seed, **job.reading(layout)}
    return batches(_text(job).train, **cut)


def _text(job: Job) -> Text:
    data = job.config.data
    return load_text(
        data.source, tokenizer=job.tokenizer, options=data.read_options, heldout_fraction=data.heldout_fraction
    )


def _bigram(text: Text) -> float:
    """The bigram entropy of the held-out text; NaN where a table of its pairs would be too large."""
    return bigram_entropy(text.heldout, text.vocab) if text.vocab <= MAX_BIGRAM_VOCAB else math.nan


def _process() -> dict[str, int]:
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}
