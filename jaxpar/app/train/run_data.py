"""``RunData``: the batches of a run, from a text or from data of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jaxpar as jp
from jaxpar.app.job import Job
from jaxpar.data import Text, bigram_entropy, load_text
from jaxpar.data.entropy import MAX_BIGRAM_VOCAB
from jaxpar.data.loader import Batches, Stream, plan_eval_batches
from jaxpar.data.windows import EpochPlan, Windows


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
    line = (
        f"{text.name}: {text.train.size:,} tokens to train on, {text.heldout.size:,} held out "
        f"({text.heldout_documents} of {text.documents} {text.unit}); batch {config.data.batch} × {config.data.seq} "
        f"tokens{text.bad and '; '}{text.bad}"
    )
    heldout = plan_eval_batches(_plan(job, layout, text, text.heldout, process), config.train.eval_batches)
    return RunData(_stream(job, layout, text, process), heldout, "text", line, _bigram(text))


def global_stream(job: Job, layout: jp.Layout) -> Stream:
    """Returns the training batches with the rows of all processes."""
    return job.data.stream() if job.data is not None else _stream(job, layout, _text(job), {})


def _stream(job: Job, layout: jp.Layout, text: Text, process: Mapping[str, int]) -> Batches:
    plan = _plan(job, layout, text, text.train, process)
    return Batches(plan, seed=job.config.data.seed, shuffle=True, epochs=None)


def _plan(job: Job, layout: jp.Layout, text: Text, tokens: np.ndarray, process: Mapping[str, int]) -> EpochPlan:
    data, reading = job.config.data, job.reading(layout, text.eos)
    rows = Windows(tokens, data.seq, reading["separator"], text.checksum, text.vocab)
    return EpochPlan(rows, data.batch, **process, arrange=reading.get("arrange"))


def _text(job: Job) -> Text:
    """The text of a run. A token file needs no tokenizer to train on."""
    data = job.config.data
    tokenizer = None if data.tokenizer is None else job.tokenizer
    text = load_text(
        data.source, tokenizer=tokenizer, options=data.read_options, heldout_fraction=data.heldout_fraction
    )
    owner = "the text" if data.tokenizer is None else f"the tokenizer ({job.tokenizer.name})"
    job.check_vocab(text.vocab, owner)
    return text


def _bigram(text: Text) -> float:
    """The bigram entropy of the held-out text; NaN where a table of its pairs would be too large."""
    return bigram_entropy(text.heldout, text.vocab) if text.vocab <= MAX_BIGRAM_VOCAB else math.nan


def _process() -> dict[str, int]:
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}
