"""``jaxpar generate``: a run's model makes text, on whatever mesh is asked for, from the newest good checkpoint of the run."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import optax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.checkpoint.checking import steps_in
from jaxpar.checkpoint.manifest import NAME, read
from jaxpar.data.sources import SEPARATOR
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.infer.asked import check_requests
from jaxpar.models.decoding import cached_llama
from jaxpar.train.job import Job
from jaxpar.train.saving import _changes, _plain

BYTES = 256
"""Tokens of the one tokenizer there is: text is bytes (:mod:`jaxpar.data.sources`)."""


def generate(
    job: Job,
    prompts: Sequence[str],
    *,
    checkpoint: Path | None,
    most: int,
    sampling: jp.Sampling,
    seed: int,
    slots: int | None,
    out: TextIO,
    console: Console,
) -> list[str]:
    """Stream what the model makes of each prompt to ``out``: of one prompt byte by byte, of several each when it has ended.

    Args:
      job: the run; its layout is where the model generates.
      prompts: texts.
      checkpoint: folder of a run's checkpoints, or of one; ``None`` for initial parameters.
      most: bytes to make, at most; the separator between documents ends a text before.
      sampling: how they are drawn.
      seed: of the first prompt's key; the others' follow.
      slots: of the cache; by default as many as are needed.
      out: where the text goes.
      console: where all else is told.

    Returns:
      The texts, without their prompts.

    Raises:
      ConfigError: a prompt that is empty or does not fit the cache; a vocabulary that lacks bytes.
      CheckpointError: there is no good checkpoint, or it is of another model.
      LayoutError: the mesh does not divide parameters or cache.
    """
    if job.model.vocab < BYTES:
        raise ConfigError(
            f"model: vocab is {job.model.vocab}, but text is bytes, {BYTES} different tokens. Remedy: the model.vocab of the training, {BYTES} or more."
        )
    layout, texts = job.layout(), [list(prompt.encode()) for prompt in prompts]
    ways = {dim: _ways(layout, dim) for dim in ("batch", "cache_seq")}
    longest = max((len(text) for text in texts), default=0) + most
    slots = _rounded(longest, math.lcm(16, ways["cache_seq"])) if slots is None else slots
    seeds = range(seed, seed + len(texts))
    check_requests(texts, most, list(seeds), slots=slots, vocab=job.model.vocab)
    model = jp.Generator(
        layout,
        job.make_model,
        cached_llama(job.model),
        batch=_rounded(len(texts), ways["batch"]),
        slots=slots,
        sampling=sampling,
        stop=tuple(SEPARATOR),
    )
    params = _parameters(job, layout, model, checkpoint, console)
    if job.model.dtype != job.model.param_dtype:
        params = model.prepare(params)
    return _streamed(model, params, prompts, texts, most, list(seeds), out, console)


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
    prompts: Sequence[str],
    texts: list[list[int]],
    most: int,
    seeds: list[int],
    out: TextIO,
    console: Console,
) -> list[str]:
    """Write bytes as they come; those that make no UTF-8 as its replacement character."""
    readers = [codecs.getincrementaldecoder("utf-8")("replace") for _ in texts]
    made, ended, count, began = [""] * len(texts), [False] * len(texts), 0, 0.0
    alone = len(texts) == 1
    out.write(prompts[0] if alone else "")

    def end(row: int) -> None:
        ended[row] = True
        made[row] += readers[row].decode(b"", final=True)
        out.write("\n" if alone else f"[{row}] {prompts[row]}{made[row]}\n")
        out.flush()

    for tokens in model.stream(params, texts, most=most, seeds=seeds):
        began = began or time.perf_counter()  # the first tokens have waited for the compiler
        for row, token in enumerate(tokens):
            if token < 0 or token in model.stop:
                if not ended[row]:
                    end(row)
                continue
            count += 1
            text = readers[row].decode(bytes([token])) if token < BYTES else "\ufffd"
            made[row] += text
            if alone:
                out.write(text)
                out.flush()
    for row, done in enumerate(ended):
        if not done:
            end(row)
    after = max(count - len(texts), 0) / (time.perf_counter() - began)
    console.print(f"{count} tokens of {len(texts)} prompt(s); after the first, {after:.1f} a second")
    return made


def _ways(layout: jp.Layout, dim: str) -> int:
    """Among how many devices the rules split a dim; a cache's slots as ``seq`` if they have no rule."""
    table = layout.rules.table
    found = layout.resolve(("seq" if dim not in table and dim == "cache_seq" else dim,))
    return math.prod(layout.sizes.get(axis, 1) for axis in found.axes[0])


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
