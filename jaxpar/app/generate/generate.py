"""``jaxpar generate``: generate text on any mesh with the newest undamaged checkpoint of a run."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.analysis.units import show_bytes
from jaxpar.app.adapted import merged_params, plain_model
from jaxpar.app.generate.chat import Prompts
from jaxpar.app.generate.prompts import Answer, Page
from jaxpar.app.job import Job, with_dtypes
from jaxpar.app.launch import heartbeat
from jaxpar.app.quantize_config import QuantizeSettings, quantize_config
from jaxpar.app.train.checkpointing import config_changes, config_values, flatten
from jaxpar.app.train.compile import iterate_until_signal
from jaxpar.app.train.signals import Stop, signal_name
from jaxpar.app.trained_model import quantize_settings
from jaxpar.checkpoint.leftovers import leftovers_in
from jaxpar.checkpoint.manifest import NAME, read
from jaxpar.checkpoint.verify import steps_in
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.inference.cached_model import CACHE_SEQ, DecoderFns
from jaxpar.inference.generator import shards_of, with_cache
from jaxpar.inference.pipeline import stages_of
from jaxpar.inference.request import SEEDS, check_requests
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.decode import cached_llama
from jaxpar.training.model.quantize_targets import QuantizeConfig
from jaxpar.training.quantize import bytes_of
from jaxpar.utils.multihost import check_same, gather, settled

MOST_ROWS = 16
"""Default maximum number of prompts in a batch."""
INTERRUPTED = "interrupted"
"""Why a text ended that was cut short by a signal."""
_SAME = ("model", "layout", "precision", "parallel", "generate", "train.seed")
"""Configuration keys that affect the generated tokens."""
_WORDS = {"slots": "--cache", "most": "--max-new-tokens"}


@dataclass(frozen=True)
class GenerateOptions:
    """The options of a generation.

    Attributes:
      most: maximum number of tokens to generate; the token that ends a document ends a text earlier.
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


def generator(
    job: Job, texts: Sequence[Sequence[int]], options: GenerateOptions, stop_tokens: Sequence[int] = ()
) -> jp.Generator:
    """Returns the generator of a run's model, with room for these prompts.

    Args:
      job: the run.
      texts: the prompts as token ids.
      options: the options.
      stop_tokens: tokens that end a text, beside the one that ends a document.

    Raises:
      ConfigError: a prompt is empty or does not fit the cache, the vocabulary lacks tokens, the batch is empty, or a
        stop string is empty.
      LayoutError: the mesh does not divide parameters or cache.
    """
    cached = _decoder(job, options)
    tokenizer = job.tokenizer
    if cached.vocab < tokenizer.vocab:
        raise ConfigError(
            f"model: vocab must be at least {tokenizer.vocab}, the number of tokens of the tokenizer "
            f"({tokenizer.name}), got {cached.vocab}. Remedy: the model.vocab of the training run."
        )
    if "" in options.stop:
        raise ConfigError("generate: a stop string is empty, so no text could be generated. Remedy: leave it out.")
    if options.batch is not None and options.batch < 1:
        raise ConfigError(f"generate: batch must be at least 1, got {options.batch}.")
    layout, slots = job.layout(), options.slots
    num_shards = {dim: shards_of(with_cache(layout), dim) for dim in ("batch", CACHE_SEQ)}
    longest = max((len(text) for text in texts), default=0) + options.most
    slots = _rounded(longest, math.lcm(16, num_shards[CACHE_SEQ])) if slots is None else slots
    seeds = range(options.seed, options.seed + len(texts))
    if not 0 <= options.seed <= SEEDS - len(texts):
        raise ConfigError(
            f"generate: seed must be between 0 and {SEEDS - max(1, len(texts))}, got {options.seed}, because each of "
            f"the {len(texts)} prompt(s) has its own seed, counting up from it."
        )
    spell = lambda name, value: f"{_WORDS[name]} {value}"
    check_requests(texts, options.most, seeds, slots=slots, vocab=cached.vocab, spell=spell)
    rows = min(len(texts), MOST_ROWS) if options.batch is None else options.batch
    room = {"batch": _rounded(rows, num_shards["batch"] * stages_of(layout, cached)), "slots": slots}
    make_model = plain_model(job.make_model)
    stop = tuple({tokenizer.eos, *stop_tokens})
    return jp.Generator(layout, make_model, cached, **room, sampling=options.sampling, stop=stop)


def _decoder(job: Job, options: GenerateOptions) -> DecoderFns:
    """The model's forward passes with a cache, in the configured formats."""
    formats = job.config.generate
    trained = quantize_settings(job.config.model)
    kept: dict[str, Any] = {"weights": formats.weights or trained, "cache": formats.cache}
    if options.int8 is not None:
        kept = {name: "int8" if name in options.int8 else None for name in kept}
    own = not isinstance(job.model, LlamaConfig)
    if isinstance(kept["weights"], QuantizeSettings):
        kept["weights"] = quantize_config(kept["weights"], None if own else job.llama, "generate.weights")
    if isinstance(job.model, LlamaConfig):
        return cached_llama(job.model, **kept)
    decoder = job.model.decoder()
    if isinstance(kept["weights"], QuantizeConfig):
        decoder, kept["weights"] = replace(decoder, quantize=kept["weights"]), None
    if any(kept.values()):
        raise ConfigError(
            f"generate: int8 is for built-in models, but {job.model.name} is one of your own. Remedy: leave it out; "
            "the decoder itself can store integers (prepare, cache)."
        )
    return decoder


def generate(job: Job, prompts: Prompts, options: GenerateOptions, *, out: TextIO, console: Console) -> list[Answer]:
    """Stream the generated text of each prompt to ``out``, and all messages to ``console``; returns the answers.

    A signal ends the generation; the answers then hold the text so far. With several processes all of them call this
    with the same prompts; ``out`` and ``console`` may differ.

    Raises:
      ConfigError, LayoutError: as :func:`generator`; or the processes have different options.
      CheckpointError: there is no undamaged checkpoint, or it is of another model.
      LaunchError: another process is gone.
    """
    remedy = "use the same command and configuration in every process."
    check_same("generate", _shared_facts(job, prompts.texts, options), remedy)
    job = settled(lambda: as_saved(job, options.checkpoint))
    texts, stops = prompts.ids, (*options.stop, *prompts.stop)
    model = settled(lambda: generator(job, texts, options, prompts.stop_tokens))
    answers = [Answer(prompt, stops, decoder=job.tokenizer.decoder()) for prompt in prompts.texts]
    seconds, later_tokens = 0.0, 0
    with Stop() as stop:
        heartbeat.begin("restore")
        params = _parameters(job, model, options.checkpoint, console)
        dtypes = [[x.dtype for x in jax.tree.leaves(made)] for made in (model.params, model.prepared)]
        if dtypes[0] != dtypes[1]:
            before, params = bytes_of(params), model.prepare(params)
            if bytes_of(params) < before:
                console.print(
                    f"weights: {show_bytes(bytes_of(params))}, instead of {show_bytes(before)} as they are saved"
                )
        for first in range(0, len(texts) if not stop.number else 0, model.batch):
            batch = slice(first, first + model.batch)
            tokens = iterate_until_signal(_steps(model, params, texts[batch], options, first), stop)
            with closing(tokens) as steps, Page(out, answers[batch], first, single=len(texts) == 1) as page:
                count, duration = _streamed(steps, model, options.most, answers[batch], page)
            later_tokens, seconds = later_tokens + count, seconds + duration
            if stop.number:
                break
    for answer in answers:
        answer.why = answer.why or INTERRUPTED
    count = sum(answer.count for answer in answers)
    why = f"stopped by {signal_name(stop.number)}: " if stop.number else ""
    speed = f"{later_tokens / seconds:.1f}" if seconds and later_tokens else "none"
    console.print(f"{why}{count} tokens of {len(texts)} prompt(s); after the first tokens, {speed} tokens/s")
    return answers


def _shared_facts(job: Job, prompts: Sequence[str], options: GenerateOptions) -> dict[str, Any]:
    """Everything that affects the tokens, by names that a user knows."""
    texts = {}
    for number, text in enumerate(prompts):
        start, digest = f"{text[:20]!r}{'...' if len(text) > 20 else ''}", _digest(text.encode(errors="surrogatepass"))
        texts[f"prompt {number}"] = f"{start} of {len(text)} characters (sha256 {digest})"
    own = {name: getattr(options, name) for name in ("most", "seed", "slots", "batch", "stop", "int8")}
    own |= {"tokenizer": job.tokenizer.digest, "sampling": repr(options.sampling)}
    own |= {"checkpoint": "one" if options.checkpoint else "none"}
    values = flatten(config_values(job)).items()
    config = {f"{name} in the configuration": value for name, value in values if name.startswith(_SAME)}
    return {"the number of prompts": len(prompts), **texts, **own, **config}


def _steps(
    model: jp.Generator, params: Any, texts: Sequence[list[int]], options: GenerateOptions, first: int
) -> Generator[list[int]]:
    """The tokens of one batch of prompts, step by step; each step is reported to the supervisor."""
    heartbeat.begin("compile")
    seeds = range(options.seed + first, options.seed + first + len(texts))
    for number, tokens in enumerate(model.stream(params, texts, most=options.most, seeds=seeds, first=first), 1):
        heartbeat.beat(first // model.batch * options.most + number)
        yield tokens


def restored(directory: Path, params: Any, tell: Any) -> tuple[Any, Path]:
    """Restore the parameters of the newest undamaged step, sharded as ``params`` are; locks nothing.

    With several processes each reads the pieces that its devices need, and all take the same step: the newest that is
    present and undamaged for every process.

    Args:
      directory: folder of a run's checkpoints, or of one checkpoint.
      params: the parameters, as shapes with shardings.
      tell: called with a message for each newer step that is damaged or incomplete.

    Returns:
      The parameters, and the folder of the step.

    Raises:
      CheckpointError: there is no step, all are damaged, or the newest undamaged one is of another model; or the
        processes see different checkpoints.
    """
    single, names = settled(lambda: _folders(directory))
    names_by_process = [set(text.decode().split("/")) for text in gather("/".join(names).encode())]
    common = [name for name in names if all(name in others for others in names_by_process)]
    if not common:
        seen = ", ".join(f"process {rank} {sorted(some)}" for rank, some in enumerate(names_by_process))
        raise CheckpointError(
            f"{directory}: no step is visible to all processes: {seen}. Remedy: a folder that all processes share."
        )
    problems = []
    for folder in (directory if single else directory / name for name in common):
        try:
            found = settled(functools.partial(_read, folder, params, None if single else int(folder.name)))
        except DamagedError as error:
            problems.append(str(error))
            continue
        passed = [] if single else [one.reason for one in leftovers_in(directory) if one.newer_than(int(folder.name))]
        for problem in [*passed, *problems]:
            tell(f"[bold]skipped: {escape(problem)}[/]")
        remedy = "a folder that all processes share, or copies of it."
        manifest = _digest((folder / NAME).read_bytes())
        check_same(str(folder), {"the checkpoint": f"that with manifest {manifest}"}, remedy)
        return found, folder
    raise DamagedError(f"{directory}: every step is damaged: {' '.join(problems)}")


def _folders(directory: Path) -> tuple[bool, list[str]]:
    """Whether the folder is a single checkpoint, and the names of its steps, newest first."""
    one = (directory / NAME).is_file()
    names = [directory.name] if one else [str(step) for step in reversed(steps_in(directory))]
    if not names:
        passed = "".join(f" {one.reason}" for one in leftovers_in(directory))
        raise CheckpointError(
            f"{directory}: no checkpoint found.{passed} Remedy: pass the folder of a run's checkpoints, such as "
            "runs/one/checkpoints, or of one of its steps."
        )
    return one, names


def _read(folder: Path, params: Any, step: int | None) -> Any:
    return jp.restore(folder, {"params": params}, only=["params"], step=step, cast=True)["params"]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def as_saved(job: Job, checkpoint: Path | None) -> Job:
    """Returns the job with parameters in the dtype of a checkpoint: generating needs no copy of them in fp32.

    Args:
      job: the run.
      checkpoint: the folder of its checkpoints, or of one; ``None`` for initial parameters.
    """
    if (
        checkpoint is None
        or not isinstance(job.model, LlamaConfig)
        or plain_model(job.make_model) is not job.make_model
    ):
        return job
    single, names = _folders(checkpoint)
    try:
        tensors = read(checkpoint if single else checkpoint / names[0]).tensors
    except DamagedError:  # an older step is restored
        return job
    dtypes = {tensor.dtype for path, tensor in tensors.items() if path.startswith("params/")}
    return with_dtypes(job, param_dtype=dtypes.pop()) if dtypes in ({"bfloat16"}, {"float16"}) else job


def _parameters(job: Job, model: jp.Generator, checkpoint: Path | None, console: Console) -> Any:
    layout = model.layout
    split = ", ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one device"
    if checkpoint is None and job.lora is not None and job.config.train.init_from is not None:
        console.print(f"parameters of {escape(job.config.train.init_from)}, with adapters at step 0, on {split}")
        return merged_params(job, layout, model.params)
    if checkpoint is None:
        console.print(
            f"[bold]INITIAL parameters, not trained, on {split}: the generated text is noise.[/] Remedy: --checkpoint "
            "DIR"
        )
        return jp.init(layout, plain_model(job.make_model), optax.identity(), seed=job.config.train.seed).params
    adapted = job.lora is not None
    like = jp.abstract_state(layout, job.make_model, optax.identity()).params if adapted else model.params
    params, folder = restored(checkpoint, like, console.print)
    params = merged_params(job, layout, model.params, params, folder) if adapted else params
    console.print(f"parameters of {escape(str(folder))} on {split}")
    of_the_run = read(folder).metadata.get("config")  # only `jaxpar train` writes it
    for line in config_changes(of_the_run, config_values(job)) if of_the_run else []:
        if line.startswith("model."):
            console.print(f"[bold]{escape(line)}[/]")
    return params


def _streamed(
    steps: Iterator[list[int]], model: jp.Generator, most: int, answers: Sequence[Answer], page: Page
) -> tuple[int, float]:
    """Show tokens as they are generated, invalid UTF-8 as U+FFFD.

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
                page.write(answer.end("stop"))
            else:
                page.write(answer.add(token))
                if not answer.why and answer.count == most:
                    page.write(answer.end("length"))
            if answer.why:
                page.ended(row)
        page.refresh()
        if all(answer.why for answer in answers):
            break
    seconds = time.perf_counter() - began if began else 0.0
    for row, answer in enumerate(answers):
        if not answer.why:
            page.write(answer.end(INTERRUPTED))
            page.ended(row)
    return max(0, sum(answer.count for answer in answers) - len(answers)), seconds


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
