"""``jaxpar generate``: generate text on any mesh with the newest undamaged checkpoint of a run."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.app.generate.prompts import BYTES, Answer, Page, as_bytes
from jaxpar.app.job import Job
from jaxpar.app.launch import heartbeat
from jaxpar.app.train.checkpointing import _changes, _flat, _plain
from jaxpar.app.train.compile import until_asked
from jaxpar.app.train.signals import Stop, told
from jaxpar.checkpoint.manifest import NAME, read
from jaxpar.checkpoint.verify import steps_in
from jaxpar.data.sources import SEPARATOR
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.inference.pipeline import stages_of
from jaxpar.inference.request import SEEDS, check_requests
from jaxpar.models.llama.decode import cached_llama
from jaxpar.utils.multihost import check_same, gather, settled

MOST_ROWS = 16
"""Default maximum number of prompts in a batch."""
INTERRUPTED = "interrupted"
"""Why a text ended that was cut short by a signal."""
_SAME = ("model", "layout", "precision", "parallel", "generate", "train.seed")
"""Configuration keys that affect the generated tokens."""
_WORDS = {"slots": "--cache", "most": "--max-new-tokens"}


@dataclass(frozen=True)
class Wanted:
    """The options of a generation.

    Attributes:
      most: maximum number of bytes to generate; the document separator ends a text earlier.
      sampling: how tokens are sampled.
      seed: seed of the first prompt's key; the following prompts get the following seeds.
      slots: size of the cache in tokens; by default as many as are needed.
      batch: number of prompts in a batch; by default all, but at most 16.
      stop: strings that end a text and are not part of it.
      int8: which of ``weights`` and ``cache`` are stored in 8-bit integers; by default as in the run's ``generate``.
      checkpoint: folder of a run's checkpoints, or of one checkpoint; ``None`` for initial parameters.
    """

    most: int = 128
    sampling: jp.inference.Sampling = field(default_factory=jp.inference.Sampling)
    seed: int = 0
    slots: int | None = None
    batch: int | None = None
    stop: tuple[str, ...] = ()
    int8: tuple[str, ...] | None = None
    checkpoint: Path | None = None


def generator(job: Job, texts: Sequence[Sequence[int]], wanted: Wanted) -> jp.Generator:
    """Return the generator of a run's model, with room for these prompts.

    Args:
      job: the run.
      texts: the prompts as token ids.
      wanted: the options.

    Raises:
      ConfigError: a prompt is empty or does not fit the cache, the vocabulary lacks bytes, the batch is empty, or a
        stop string is empty.
      LayoutError: the mesh does not divide parameters or cache.
    """
    if job.model.vocab < BYTES:
        raise ConfigError(
            f"model: vocab is {job.model.vocab}, but text is bytes, {BYTES} different tokens. Remedy: the model.vocab "
            f"of the training, {BYTES} or more."
        )
    if "" in wanted.stop:
        raise ConfigError("generate: a stop text is empty, so that nothing could be made. Remedy: leave it out.")
    if wanted.batch is not None and wanted.batch < 1:
        raise ConfigError(f"generate: batch is {wanted.batch}, but 1 or more prompts at once are wanted.")
    layout, slots = job.layout(), wanted.slots
    ways = {dim: _ways(layout, dim) for dim in ("batch", "cache_seq")}
    longest = max((len(text) for text in texts), default=0) + wanted.most
    slots = _rounded(longest, math.lcm(16, ways["cache_seq"])) if slots is None else slots
    seeds = range(wanted.seed, wanted.seed + len(texts))
    if not 0 <= wanted.seed <= SEEDS - len(texts):
        raise ConfigError(
            f"generate: seed is {wanted.seed}, but 0 to {SEEDS - max(1, len(texts))} is wanted, as each of "
            f"{len(texts)} prompt(s) has its own, one after another."
        )
    spell = lambda name, value: f"{_WORDS[name]} {value}"
    check_requests(texts, wanted.most, seeds, slots=slots, vocab=job.model.vocab, spell=spell)
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
    """Stream the generated text of each prompt to ``out``, and all messages to ``console``; returns the answers.

    A signal ends the generation; the answers then hold the text so far. With several processes all of them call this
    with the same prompts; ``out`` and ``console`` may differ.

    Raises:
      ConfigError, LayoutError: as :func:`generator`; or the processes have different options.
      CheckpointError: there is no undamaged checkpoint, or it is of another model.
      LaunchError: another process is gone.
    """
    check_same("generate", _facts(job, prompts, wanted), "the same command and configuration in every process.")
    texts = [list(as_bytes(number, prompt)) for number, prompt in enumerate(prompts)]
    model = settled(lambda: generator(job, texts, wanted))
    answers = [Answer(prompt, wanted.stop) for prompt in prompts]
    seconds, later = 0.0, 0
    with Stop() as stop:
        heartbeat.doing("restore")
        params = _parameters(job, model.layout, model, wanted.checkpoint, console)
        if _dtypes(model.params) != _dtypes(model.prepared):
            params = model.prepare(params)
        for first in range(0, len(texts) if not stop.asked else 0, model.batch):
            turn = slice(first, first + model.batch)
            made = until_asked(_steps(model, params, texts[turn], wanted, first), stop)
            with closing(made) as steps, Page(out, answers[turn], first, alone=len(texts) == 1) as page:
                came, took = _streamed(steps, model, wanted.most, answers[turn], page)
            later, seconds = later + came, seconds + took
            if stop.asked:
                break
    for answer in answers:
        answer.why = answer.why or INTERRUPTED
    count = sum(answer.count for answer in answers)
    why = f"stopped by {told(stop.asked)}: " if stop.asked else ""
    speed = f"{later / seconds:.1f}" if seconds and later else "none"
    console.print(f"{why}{count} tokens of {len(texts)} prompt(s); after the first, {speed} a second")
    return answers


def _facts(job: Job, prompts: Sequence[str], wanted: Wanted) -> dict[str, Any]:
    """Everything that affects the tokens, by names that a user knows."""
    digest = lambda text: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    texts = {
        f"prompt {number}": f"{text[:20]!r}{'...' if len(text) > 20 else ''} of {len(text)} characters (sha256 "
        f"{digest(text)})"
        for number, text in enumerate(prompts)
    }
    asked = {name: getattr(wanted, name) for name in ("most", "seed", "slots", "batch", "stop", "int8")}
    asked |= {"sampling": repr(wanted.sampling), "checkpoint": "one" if wanted.checkpoint else "none"}
    every = dict(_flat(_plain(job)))
    config = {f"{name} of the configuration": value for name, value in every.items() if name.startswith(_SAME)}
    return {"the number of prompts": len(prompts), **texts, **asked, **config}


def _steps(
    model: jp.Generator, params: Any, texts: list[list[int]], wanted: Wanted, first: int
) -> Generator[list[int]]:
    """The tokens of one batch of prompts, step by step; each step is reported to the supervisor."""
    heartbeat.doing("compile")
    seeds = range(wanted.seed + first, wanted.seed + first + len(texts))
    for number, tokens in enumerate(model.stream(params, texts, most=wanted.most, seeds=seeds, first=first), 1):
        heartbeat.beat(first // model.batch * wanted.most + number)
        yield tokens


def restored(directory: Path, params: Any, tell: Any) -> tuple[Any, Path]:
    """Restore the parameters of the newest undamaged step, sharded as ``params`` are; locks nothing.

    With several processes each reads the pieces that its devices need, and all take the same step: the newest that is
    present and undamaged for every process.

    Args:
      directory: folder of a run's checkpoints, or of one checkpoint.
      params: the parameters, as shapes with shardings.
      tell: called with a message for each damaged step.

    Returns:
      The parameters, and the folder of the step.

    Raises:
      CheckpointError: there is no step, all are damaged, or the newest undamaged one is of another model; or the
        processes see different checkpoints.
    """
    one, names = settled(lambda: _folders(directory))
    every = [set(text.decode().split("/")) for text in gather("/".join(names).encode())]
    common = [name for name in names if all(name in others for others in every)]
    if not common:
        seen = ", ".join(f"process {rank} {sorted(some)}" for rank, some in enumerate(every))
        raise CheckpointError(
            f"{directory}: no step is there for all processes: {seen}. Remedy: one folder that all of them see."
        )
    problems = []
    for folder in (directory if one else directory / name for name in common):
        try:
            found = settled(
                lambda folder=folder: _read(folder, params, None if one else int(folder.name))  # type: ignore[misc]
            )
        except DamagedError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            tell(f"[bold]passed over: {escape(problem)}[/]")
        remedy = "one folder that all processes see, or copies of it."
        check_same(str(folder), {"the checkpoint": f"that with manifest {_digest(folder)}"}, remedy)
        return found, folder
    raise CheckpointError(f"{directory}: no step is as it was written: {' '.join(problems)}")


def _folders(directory: Path) -> tuple[bool, list[str]]:
    """Whether the folder is a single checkpoint, and the names of its steps, newest first."""
    one = (directory / NAME).is_file()
    names = [directory.name] if one else [str(step) for step in reversed(steps_in(directory))]
    if not names:
        raise CheckpointError(
            f"{directory}: no checkpoint. Remedy: the folder of a run's checkpoints, as runs/one/checkpoints, or of "
            "one of its steps."
        )
    return one, names


def _read(folder: Path, params: Any, step: int | None) -> Any:
    return jp.restore(folder, {"params": params}, only=["params"], step=step)["params"]


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / NAME).read_bytes()).hexdigest()[:12]


def _parameters(job: Job, layout: jp.Layout, model: jp.Generator, checkpoint: Path | None, console: Console) -> Any:
    split = ", ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one device"
    if checkpoint is None:
        console.print(
            f"[bold]INITIAL parameters, never trained, on {split}: what follows is noise.[/] Remedy: --checkpoint DIR"
        )
        return jp.init(layout, job.make_model, optax.identity(), seed=job.config.train.seed).params
    params, folder = restored(checkpoint, model.params, console.print)
    console.print(f"parameters of {escape(str(folder))} on {split}")
    of_the_run = read(folder).metadata.get("config")  # only `jaxpar train` writes it
    for line in _changes(of_the_run, _plain(job)) if of_the_run else []:
        if line.startswith("model."):
            console.print(f"[bold]{escape(line)}[/]")
    return params


def _streamed(
    steps: Iterator[list[int]], model: jp.Generator, most: int, answers: Sequence[Answer], page: Page
) -> tuple[int, float]:
    """Show bytes as they are generated, invalid UTF-8 as U+FFFD.

    Returns:
      The number of tokens after the first ones, and the seconds that they took.
    """
    began = 0.0
    for tokens in steps:
        began = began or time.perf_counter()  # excludes the first tokens, which include the compile
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
    took = time.perf_counter() - began if began else 0.0
    for row, answer in enumerate(answers):
        if not answer.why:
            page.more(answer.end(INTERRUPTED))
            page.ended(row)
    return max(0, sum(answer.count for answer in answers) - len(answers)), took


def _dtypes(params: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(params)]


def _ways(layout: jp.Layout, dim: str) -> int:
    """The number of shards of a dim under the rules; ``cache_seq`` is sharded as ``seq`` if it has no rule."""
    table = layout.rules.table
    found = layout.resolve(("seq" if dim not in table and dim == "cache_seq" else dim,))
    return math.prod(layout.sizes.get(axis, 1) for axis in found.axes[0])


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
