"""``RunData``: the batches of a run, from a text or from data of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jaxpar as jp
from jaxpar.app.conversation_data import conversation_plans, describe, run_conversations
from jaxpar.app.job import Job
from jaxpar.app.text_data import RunText, TextPart, load_run_text
from jaxpar.data.blend import Blend, BlendOrder
from jaxpar.data.loader import Batches, Stream, plan_eval_batches
from jaxpar.data.windows import EpochPlan
from jaxpar.training.batch import row_share

type Identity = dict[str, int | str]
"""What must be equal for the data of two runs to be the same, by its name in errors."""


@dataclass(frozen=True)
class RunData:
    """The batches of one process.

    Attributes:
      stream: batches to train on.
      heldout: batches to evaluate on; empty if nothing is held out.
      title, line: what kind of data it is, and a line about it.
      identity: returns what must be equal when a run resumes, beside the position of ``stream``; it may hash a text.
      bigram: the bigram entropy of the held-out text, in nats per token; NaN without a text.
    """

    stream: Stream
    heldout: list[Any]
    title: str
    line: str
    identity: Callable[[], Identity] = dict
    bigram: float = math.nan


def open_data(job: Job, layout: jp.Layout) -> RunData:
    """Returns the batches of this process, with those for evaluation.

    Processes whose devices hold the same rows read the same rows (:func:`jaxpar.training.batch.row_share`).

    Raises:
      ConfigError: the vocabulary of the model is smaller than that of the tokenizer.
      DataError: the data does not fit the batch, or cannot be read.
    """
    share = row_share(layout, job.batch_dims())
    config, process = job.config, {"process_index": share.index, "process_count": share.count}
    if job.data is not None:
        heldout, identity = job.data.heldout(config.train.eval_batches, **process), job.data.heldout_identity
        return RunData(job.data.stream(**process), heldout, "data", job.data.describe(), identity)
    if config.data.chat_template is not None:
        found = run_conversations(config, job.tokenizer)
        train, evaluation = conversation_plans(found, config.data.batch, process)
        heldout = evaluation.heldout(config.train.eval_batches)
        return RunData(train.stream(config.data.seed), heldout, "text", describe(found, config), found.identity)
    text = _text(job)
    plan = _plan(job, layout, text, "heldout", process)
    heldout, stream = plan_eval_batches(plan, config.train.eval_batches), _stream(job, layout, text, process)
    return RunData(stream, heldout, "text", text.describe(), partial(_heldout_identity, plan), text.bigram())


def _heldout_identity(plan: EpochPlan) -> Identity:
    return {f"held-out {name}": value for name, value in plan.identity().items()}


def global_stream(job: Job, layout: jp.Layout, process: Mapping[str, int] | None = None) -> Stream:
    """Returns the training batches with the rows of all processes, or of one (``process_index``, ``process_count``)."""
    process = process or {}
    if job.data is not None:
        return job.data.stream(**process)
    if job.config.data.chat_template is not None:
        found = run_conversations(job.config, job.tokenizer)
        return conversation_plans(found, job.config.data.batch, process)[0].stream(job.config.data.seed)
    return _stream(job, layout, _text(job), process)


def _stream(job: Job, layout: jp.Layout, text: RunText, process: Mapping[str, int]) -> Batches:
    plan, seed = _plan(job, layout, text, "train", process), job.config.data.seed
    order = BlendOrder(plan.rows, plan.batch, seed) if isinstance(plan.rows, Blend) else None
    return Batches(plan, seed=seed, order=order)


def _plan(job: Job, layout: jp.Layout, text: RunText, part: TextPart, process: Mapping[str, int]) -> EpochPlan:
    arrange = job.reading(layout).get("arrange")
    return EpochPlan(text.rows(part), job.config.data.batch, **process, arrange=arrange, heldout=part == "heldout")


def _text(job: Job) -> RunText:
    """The text of a run. A token file needs no tokenizer to train on."""
    named = job.config.data.tokenizer is not None
    text = load_run_text(job.config.data, job.tokenizer if named else None)
    job.check_vocab(text.vocab, f"the tokenizer ({job.tokenizer.name})" if named else "the text")
    return text
