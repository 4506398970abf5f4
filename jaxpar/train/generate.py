"""``jaxpar generate``: a run's model makes text, on whatever mesh is asked for, from the newest good checkpoint of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.checkpoint.checking import steps_in
from jaxpar.checkpoint.manifest import NAME, read
from jaxpar.data.sources import SEPARATOR
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.infer.asked import check_requests
from jaxpar.infer.circle import stages_of
from jaxpar.models.decoding import cached_llama
from jaxpar.train.job import Job
from jaxpar.train.prompts import BYTES, Answer, Page
from jaxpar.train.saving import _changes, _plain

MOST_ROWS = 16
"""So many prompts at once, where nothing else is asked for."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a run's model.

    Attributes:
      most: bytes to make, at most; the separator between documents ends a text before.
      sampling: how they are drawn.
      seed: of the first prompt's key; the others' follow.
      slots: of the cache; by default as many as are needed.
      batch: prompts at once; by default all, 16 at the most.
      stop: texts that end what is made, and are left out of it.
      int8: what of ``weights`` and ``cache`` is kept in 8-bit integers; by default as the run's ``generate`` says.
      checkpoint: folder of a run's checkpoints, or of one; ``None`` for initial parameters.
    """

    most: int = 128
    sampling: jp.Sampling = field(default_factory=jp.Sampling)
    seed: int = 0
    slots: int | None = None
    batch: int | None = None
    stop: tuple[str, ...] = ()
    int8: tuple[str, ...] | None = None
    checkpoint: Path | None = None


def generator(job: Job, texts: Sequence[Sequence[int]], wanted: Wanted) -> jp.Generator:
    """The generator of a run's model that has room for these prompts.

    Raises:
      ConfigError: a prompt that is empty or does not fit the cache; a vocabulary that lacks bytes; no rows, or an empty stop.
      LayoutError: the mesh does not divide parameters or cache.
    """
    if job.model.vocab < BYTES:
        raise ConfigError(
            f"model: vocab is {job.model.vocab}, but text is bytes, {BYTES} different tokens. Remedy: the model.vocab of the training, {BYTES} or more."
        )
    if "" in wanted.stop:
        raise ConfigError("generate: a stop text is empty, so that nothing could be made. Remedy: leave it out.")
    if wanted.batch is not None and wanted.batch < 1:
        raise ConfigError(f"generate: batch is {wanted.batch}, but 1 or more prompts at once are wanted.")
    layout, slots = job.layout(), wanted.slots
    ways = {dim: _ways(layout, dim) for dim in ("batch", "cache_seq")}
    longest = max((len(text) for text in texts), default=0) + wanted.most
    slots = _rounded(longest, math.lcm(16, ways["cache_seq"])) if slots is None else slots
    check_requests(texts, wanted.most, None, slots=slots, vocab=job.model.vocab)
    asked = job.config.generate
    kept: dict[str, Any] = {"weights": asked.weights, "cache": asked.cache}
    if wanted.int8 is not None:
        kept = {name: "int8" if name in wanted.int8 else None for name in kept}
    cached, rows = cached_llama(job.model, **kept), min(len(texts), MOST_ROWS) if wanted.batch is None else wanted.batch
    return jp.Generator(
        layout,
        job.make_model,
        cached,
        batch=_rounded(rows, ways["batch"] * stages_of(layout, cached)),
        slots=slots,
        sampling=wanted.sampling,
        stop=tuple(SEPARATOR),
    )


def generate(job: Job, prompts: Sequence[str], wanted: Wanted, *, out: TextIO, console: Console) -> list[Answer]:
    """Stream what the model makes of each prompt to ``out``; all else is told on ``console``.

    Raises:
      ConfigError, LayoutError: as :func:`generator`.
      CheckpointError: there is no good checkpoint, or it is of another model.
    """
    texts = [list(prompt.encode()) for prompt in prompts]
    model = generator(job, texts, wanted)
    params = _parameters(job, model.layout, model, wanted.checkpoint, console)
    if _dtypes(model.params) != _dtypes(model.prepared):
        params = model.prepare(params)
    answers = [Answer(prompt, wanted.stop) for prompt in prompts]
    seconds, later = 0.0, 0
    for first in range(0, len(texts), model.batch):
        turn = slice(first, first + model.batch)
        seeds = range(wanted.seed + first, wanted.seed + first + len(texts[turn]))
        with Page(out, answers[turn], first, alone=len(texts) == 1) as page:
            came, took = _streamed(model, params, texts[turn], wanted.most, list(seeds), answers[turn], page)
            later, seconds = later + came, seconds + took
    count = sum(answer.count for answer in answers)
    speed = f"{later / seconds:.1f}" if seconds else "none"
    console.print(f"{count} tokens of {len(texts)} prompt(s); after the first, {speed} a second")
    return answers


def restored(directory: Path, params: Any, tell: Any) -> tuple[Any, Path]:
    """The parameters of the newest step that is as it was written, laid out as ``params`` are, and its folder. Nothing is locked.

    Raises:
      CheckpointError: there is none, none is good, or the newest good one is of another model.
    """
    one = (directory / NAME).is_file()
    folders = [directory] if one else [directory / str(step) for step in reversed(steps_in(directory))]
    if not folders:
        raise CheckpointError(
            f"{directory}: no checkpoint. Remedy: the folder of a run's checkpoints, as runs/one/checkpoints, or of one of its steps."
        )
    problems = []
    for folder in folders:
        try:
            found = jp.restore(folder, {"params": params}, only=["params"], step=None if one else int(folder.name))
        except DamagedError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            tell(f"[bold]passed over: {escape(problem)}[/]")
        return found["params"], folder
    raise CheckpointError(f"{directory}: no step is as it was written: {' '.join(problems)}")


def _parameters(job: Job, layout: jp.Layout, model: jp.Generator, checkpoint: Path | None, console: Console) -> Any:
    split = ", ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one device"
    if checkpoint is None:
        console.print(
            f"[bold]INITIAL parameters, never trained, on {split}: what follows is noise.[/] Remedy: --checkpoint DIR"
        )
        return jp.init(layout, job.make_model, optax.identity(), seed=job.config.train.seed).params
    params, folder = restored(checkpoint, model.params, console.print)
    console.print(f"parameters of {escape(str(folder))} on {split}")
    for line in _changes(read(folder).about.get("config"), _plain(job)):
        if line.startswith("model."):
            console.print(f"[bold]{escape(line)}[/]")
    return params


def _streamed(
    model: jp.Generator,
    params: Any,
    texts: list[list[int]],
    most: int,
    seeds: list[int],
    answers: Sequence[Answer],
    page: Page,
) -> tuple[int, float]:
    """Show bytes as they come, those that make no UTF-8 as its replacement character; how many came after the first, in which time."""
    began = 0.0
    for tokens in model.stream(params, texts, most=most, seeds=seeds):
        began = began or time.perf_counter()  # the first tokens have waited for the compiler
        for row, (token, answer) in enumerate(zip(tokens, answers, strict=True)):
            if answer.why:
                continue
            if token < 0 or token in model.stop:
                page.more(answer.end("stop"))
            else:
                page.more(answer.add(token))
                if not answer.why and answer.count == most:
                    page.more(answer.end("length"))
            if answer.why:
                page.ended(row)
        page.turn()
        if all(answer.why for answer in answers):
            break
    return sum(answer.count for answer in answers) - len(answers), time.perf_counter() - began


def _dtypes(params: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(params)]


def _ways(layout: jp.Layout, dim: str) -> int:
    """Among how many devices the rules split a dim; a cache's slots as ``seq`` if they have no rule."""
    table = layout.rules.table
    found = layout.resolve(("seq" if dim not in table and dim == "cache_seq" else dim,))
    return math.prod(layout.sizes.get(axis, 1) for axis in found.axes[0])


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
