"""Mutated configurations of runs, and what ``jaxpar check`` makes of them; ``tests/app/test_fuzz.py`` runs them."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import re
import signal
import time
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import optax
import yaml

import jaxpar as jp
from jaxpar.app.config import RunConfig, load_run
from jaxpar.app.job import Job, make_job
from jaxpar.app.launch.exit_codes import describe
from jaxpar.errors import JaxparError
from jaxpar.models.llama.config import PRESETS, LlamaConfig
from jaxpar.parallel.attention.options import IMPLS
from jaxpar.parallel.pipeline.schedules.registry import NAMES
from jaxpar.parallel.precision.policy import LossScale
from jaxpar.sharding.mesh import AXES, AxisSize
from jaxpar.training.remat import POLICIES
from jaxpar.utils.yaml_config import load_yaml

CONFIGS = Path(__file__).parents[1] / "configs"
MOST_TEXT, MOST_SECONDS, MOST_BYTES = 2_100, 10.0, 2**30
"""Limits of one case: characters of an error (of each problem of a list), CPU seconds, and bytes of memory."""
SECRET = "hunter2"
"""What stands in files that are no configuration, and must be in no error."""

type Path_ = tuple[str, ...]
DIMS = ("batch", "seq", "residual_seq", "embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
DTYPES = ("float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "fp8", "int8", "float64", "int32")
WORDS: Mapping[str, tuple[Any, ...]] = {
    "preset": tuple(PRESETS),
    "family": ("llama", "llama", "vit"),
    "remat": (*POLICIES, {"policy": "full", "layers": [1, 1]}, {"policy": "save_names", "save_names": ["qkv"]}),
    "policy": POLICIES,
    "stage": (0, 1, 2, 3),
    "impl": IMPLS,
    "load_balance": (None, "contiguous", "zigzag", "striped", "balanced"),
    "grad_dtype": (None, "float32", "bfloat16"),
    "schedule": (*NAMES, "pipedream", "pipedream_2bw"),
    "name": (*optax.__all__, *["adamw", "sgd", "one_bit_adam"] * 40),
    **dict.fromkeys(("precision", "dtype", "param_dtype", "compute", "gather", "reduce", "matmul"), DTYPES),
    "source": ("stdlib", "synthetic"),
    "axis": (*AXES, ["data", "model"]),
    "min_bytes": (0, 1, "4KiB", "64KiB", "1GiB"),
    "copies_dim": ("batch", "seq"),
    "unannotated": ("error", "replicate"),
    "indivisible": ({"vocab": "replicate"},),
    "reshard_after_forward": (True, False, 2, 4),
    "layout": ("layout.yaml",),
    "context": ({"impl": "ring"}, {"impl": "gather"}, {"impl": "ulysses"}, 1, 2),
    "cpu_devices": (1, 8, 8, 16),
}
"""Values that are valid for some keys, by the last part of the key."""
TEXTS = ("", " ", "x", "~", "nul\0", "\x1b[31mred\x1b[0m", "\u202elatot", "\u200b", "\ud800", "é" * 60, "x" * 5_000)
TEXTS += ("a\nb", "\x85", "../../etc/passwd", "/dev/zero", "NaN", "1e-3", "64KiB", "9" * 99 + "GiB", "%s{0}$HOME")
NUMBERS = (-1, 0, 1, 2, 3, 7, -(2**31), 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63))
NUMBERS += (10**6, 10**9, 10**12, 10**99)
FLOATS = (0.0, -0.0, 0.5, 1.5, -1.0, 2.5, 1e9, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
THINGS: tuple[Any, ...] = (None, True, False, [], {}, [None], [[[]]], {"a": 1}, {"": {}}, {1: 2}, {None: None})
THINGS += (date(2024, 1, 1), b"\xff\0", {1, 2}, list(range(3_000)), {f"k{i}": i for i in range(500)}, ["x" * 500] * 30)
RAW = ("1e400", "-.inf", "0x" + "f" * 40, "1" * 101, "0b1", "1:30", "!!python/name:os.system", "!!int ''", "*none")
RAW += ("[" * 40 + "]" * 40, "[" * 2_000, "{a: " * 500, "2024-13-45", "!!float x", "!!binary '?'", "&a [*a]", "<<", "=")
ODD = ("fifo", "folder", "loop", "missing.yaml", "/dev/null", "/dev/zero", "empty.yaml", "binary.yaml", "text.yaml")
ODD += ("note.txt", "list.txt", "bool.txt", "cycle0.yaml", "chain0.yaml", "self.yaml", "diamond.yaml", "", ".", "nul\0")
ODD += ("x" * 300, "folder/../layout.yaml")
SYNTAX = ("=", ".", "a", "train.steps", "model", *"{}[]1é'\"\n", "*a", "&a ", "!!int ", ": ")
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@dataclass(frozen=True)
class Case:
    """One mutated run: the bytes of its files, the file that the command line names, and its settings."""

    files: Mapping[str, bytes]
    config: str = "run.yaml"
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What became of a case: how far it came, the class of its error (or ``OK``), and the error's texts."""

    stage: Literal["load", "job", "layout", "check", "resolved", "passed"]
    outcome: str = "OK"
    texts: tuple[str, ...] = ()


@dataclass
class Summary:
    """Counts of outcomes, and the findings: whatever is neither a success nor a short error of our own."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    peak_bytes: int = 0
    most_bytes: tuple[int, str] = (0, "")


class TooSlow(BaseException):
    """A case took more time than it may."""


# Seeds


def seeds() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every configuration of the repository with its layout, as plain data without ``extends``."""
    found = []
    for file in sorted([CONFIGS / "quickstart.yaml", *CONFIGS.glob("*.yaml"), *CONFIGS.glob("[br]e*/*.yaml")]):
        run = load_yaml(file, paths=("layout",))
        found.append(({**run, "layout": "layout.yaml"}, load_yaml(file.parent / run["layout"])))
    return found


def leaves(kind: Any = RunConfig, at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """The path and the type of every key that a configuration may have."""
    if at == ("model",):
        kind = LlamaConfig
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        yield (*at, name), hint
        options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        for option in options:
            if dataclasses.is_dataclass(option) and (option is not jp.RematPolicy):
                yield from leaves(option, (*at, name))
    if not at:
        yield from leaves(LlamaConfig, ("model",))
        yield from leaves(LossScale, ("precision", "scale"))
        yield from ((("mesh", axis), AxisSize) for axis in AXES)
        yield from (((("rules", dim), "rule")) for dim in DIMS)
        yield from (((("rules", role, dim), "rule")) for role in ("params", "optimizer") for dim in ("embed", "mlp"))
        yield from (((("rules", key), str)) for key in ("params", "indivisible", "unannotated"))
        options = (("b1", float), ("weight_decay", float), ("mu_dtype", str), ("warmup", int), ("momentum", float))
        yield from ((("optimizer", "options", name), hint) for name, hint in options)


LEAVES = tuple(dict(leaves()).items())
EDGES = {
    path: option.__metadata__[0]
    for path, hint in LEAVES
    for option in (hint, *typing.get_args(hint))
    if typing.get_origin(option) is Annotated
}


def valid(rng: random.Random, path: Path_, hint: Any) -> Any:
    """A value that the type of a key allows, and often the key too."""
    if path[0] == "mesh":
        return rng.choice((-1, 1, 1, 2, 2, 4, 8))
    if path[-1] in WORDS and hint != "rule":
        return rng.choice(WORDS[path[-1]])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == "rule":
        return rng.choice([None, *AXES, ["data", "model"], {"first_of": ["model", None]}, {"over": "data"}])
    if origin is Annotated:
        return valid(rng, path, args[0])
    if origin is Literal:
        return rng.choice(args)
    if origin in (types.UnionType, typing.Union):
        return valid(rng, path, rng.choice(args))
    if origin in (list, tuple):
        return [valid(rng, path, args[0]) for _ in range(rng.randrange(4))]
    if dataclasses.is_dataclass(hint):
        needed = {f.name for f in dataclasses.fields(hint) if f.default is f.default_factory}  # both are MISSING
        own = [
            (n, kind)
            for n, kind in typing.get_type_hints(hint, include_extras=True).items()
            if n in needed or rng.random() < 0.3
        ]
        return {name: valid(rng, (*path, name), kind) for name, kind in own}
    if hint is float:
        return rng.choice((0.0, 0.1, 0.5, 1.5, 1.5, 10.0))
    if origin is dict:
        return {}
    return {bool: rng.random() < 0.5, int: rng.choice((1, 2, 2, 4, 8, 8, 16, 64)), str: "x"}.get(hint)


def nasty(rng: random.Random) -> Any:
    """A value that hardly any key allows; ``@raw@`` begins YAML that ``dump`` leaves as it is."""
    pool = rng.choice((TEXTS, NUMBERS, NUMBERS, FLOATS, THINGS, tuple(f"@raw@{text}@" for text in RAW)))
    value = rng.choice(pool)
    return rng.choice(([value], {"x": value})) if rng.random() < 0.1 else value


# Mutations of the data


def put(data: dict[str, Any], path: Path_, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[path[-1]] = value


def places(data: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every mapping of ``data`` and each of its keys."""
    own = [(data, key) for key in data]
    return own + [place for value in data.values() if isinstance(value, dict) for place in places(value)]


def set_valid(rng: random.Random, data: dict[str, Any]) -> None:
    path, hint = rng.choice(LEAVES)
    put(data, path, valid(rng, path, hint))
    for key, needed in (("optimizer", "stage"), ("remat", "policy")):
        if path[:2] == ("parallel", key) and isinstance(data["parallel"][key], dict):
            data["parallel"][key].setdefault(needed, rng.choice(WORDS[needed]))


def set_nasty(rng: random.Random, data: dict[str, Any]) -> None:
    free = [path for path, _ in LEAVES if path[0] in ("model", "mesh", "rules") or "options" in path]
    put(data, rng.choice(free if rng.random() < 0.5 else [path for path, _ in LEAVES]), nasty(rng))


def set_size(rng: random.Random, data: dict[str, Any]) -> None:
    path, _ = rng.choice(
        [leaf for leaf in LEAVES if leaf[0] in EDGES or leaf[1] in (int, float) or int in typing.get_args(leaf[1])]
    )
    put(data, path, rng.choice(NUMBERS))


def set_edge(rng: random.Random, data: dict[str, Any]) -> None:
    """The smallest or the largest number of a key's range, or the next one, which is outside of it."""
    path = rng.choice(tuple(EDGES))
    numbers = EDGES[path]
    put(data, path, rng.choice((numbers.least, numbers.most, numbers.most, numbers.least - 1, numbers.most + 1)))


def rename(rng: random.Random, data: dict[str, Any]) -> None:
    inner, key = rng.choice(places(data))
    inner[rng.choice((key[:-1], key + "s", key.upper(), "\x1b[2J", "\u202e", "x" * 5_000, "\ud800", "", 1, None))] = (
        inner.pop(key)
    )


def swap(rng: random.Random, data: dict[str, Any]) -> None:
    (a, i), (b, j) = rng.choice(places(data)), rng.choice(places(data))
    # A value that ends up inside itself cannot be written.
    if not isinstance(a[i], dict) and not isinstance(b[j], dict):
        a[i], b[j] = b[j], a[i]


def drop(rng: random.Random, data: dict[str, Any]) -> None:
    inner, key = rng.choice(places(data))
    del inner[key]


def wrap(rng: random.Random, data: dict[str, Any]) -> None:
    inner, key = rng.choice(places(data))
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 2, 30, 31, 40))):
        inner[key] = [inner[key]] if rng.random() < 0.5 else {key: inner[key]}


DATA: tuple[tuple[Callable[[random.Random, dict[str, Any]], None], int], ...] = (
    (set_valid, 40),
    (set_nasty, 5),
    (set_size, 3),
    (set_edge, 5),
    (rename, 1),
    (swap, 1),
    (drop, 1),
    (wrap, 1),
)


# Mutations of the text


def dump(data: Any) -> str:
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=10_000)
    for quoted in ("'", '"', ""):
        at = f"{quoted}@raw@"
        while at in text:
            before, _, rest = text.partition(at)
            raw, _, after = rest.partition(f"@{quoted}")
            text = before + (raw.replace("''", "'") if quoted == "'" else raw) + after
    return text


def broken(rng: random.Random, text: str) -> bytes:
    """The bytes of a text with one fault, or in another encoding."""
    data = text.encode("utf-8", "surrogatepass")
    at = rng.randrange(len(data) + 1)
    lines = text.splitlines(keepends=True) or [""]
    made: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
        lambda: data[:at] + rng.choice(SYNTAX).encode() + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode(rng.choice(("utf-16", "utf-32", "utf-16-le", "utf-7")), "replace"),
        lambda: (text + rng.choice(lines)).encode("utf-8", "replace"),
        lambda: (LAUGHS + text).encode("utf-8", "replace"),
        lambda: data.replace(b": ", b":\t", 3),
        lambda: b"%YAML 9.9\n---\n" + data,
        lambda: data + b"\n---\n" + data,
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: data + b"\0" * 9,
        lambda: rng.randbytes(200),
        lambda: data + f"rules: &a {{<<: {'[' * rng.randrange(60)}*a".encode(),
    ]
    return rng.choice(made)()


def setting(rng: random.Random) -> str:
    path, hint = rng.choice(LEAVES)
    if rng.random() < 0.05:
        return "".join(rng.choices((*SYNTAX, *TEXTS[:10]), k=rng.randrange(8)))
    value = valid(rng, path, hint) if rng.random() < 0.7 else nasty(rng)
    flow = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return f"{'.'.join(path)}={flow.replace('@raw@', '').strip(chr(39) + '@')}"


def small(rng: random.Random, run: dict[str, Any]) -> None:
    """Makes most runs quick to trace, and their number of devices known."""
    run.setdefault("cpu_devices", 8)
    if rng.random() < 0.95:
        run["model"]["preset"] = "tiny"
        run["data"] |= {"batch": min(run["data"]["batch"], 64), "seq": min(run["data"].get("seq", 128), 128)}
    pipeline = run.get("parallel", {}).get("pipeline", {})
    if "microbatches" in pipeline:
        pipeline["microbatches"] = min(pipeline["microbatches"], 8)
        run["model"].setdefault("layers", 32)
        pipeline.pop("recompute", None)


def case(number: int) -> Case:
    """The mutated run of this number, always the same."""
    rng = random.Random(f"fuzzed run {number}")
    run, layout = copy.deepcopy(rng.choice(SEEDS))
    small(rng, run)
    mutations, weights = zip(*DATA, strict=True)
    for mutate in rng.choices(mutations, weights, k=rng.choice((1, 1, 1, 2, 2, 3))):
        data = layout if rng.random() < 0.3 and mutate in (rename, swap, drop, wrap) else run
        if data:
            mutate(rng, data)
    files = {"run.yaml": dump(run).encode("utf-8", "surrogatepass"), "layout.yaml": dump(layout).encode()}
    fault = rng.random()
    if fault < 0.08:
        name = rng.choice(("run.yaml", "run.yaml", "layout.yaml"))
        files[name] = broken(rng, files[name].decode("utf-8", "surrogatepass"))
    config = rng.choice(ODD) if fault > 0.99 else "run.yaml"
    if 0.96 < fault < 0.99:
        key = rng.choice(("extends", "layout"))
        files["run.yaml"] = dump({**run, key: rng.choice((*ODD, *TEXTS))}).encode("utf-8", "surrogatepass")
    settings = tuple(setting(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2))))
    return Case(files, config, settings)


SEEDS = seeds()


# What becomes of a case


def sandbox(folder: Path) -> None:
    """Makes the files that are no configuration, and the chains of ``extends``."""
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "empty.yaml").touch()
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    texts = {"text.yaml": f"secret: *{SECRET}\n", "note.txt": SECRET, "list.txt": f"[{SECRET}]"}
    texts |= {"bool.txt": f"a: !!bool {SECRET}", "self.yaml": "extends: self.yaml", "chain40.yaml": "{}"}
    texts |= {
        "diamond.yaml": "extends: chain35.yaml",
        **{f"cycle{i}.yaml": f"extends: cycle{1 - i}.yaml" for i in (0, 1)},
    }
    for i in range(40):
        (folder / f"chain{i}.yaml").write_text(f"extends: chain{i + 1}.yaml")
    for name, text in texts.items():
        (folder / name).write_text(text)


def attempt(folder: Path, made: Case, known: dict[str, Seen] | None) -> Seen:
    """Does what ``jaxpar check`` does; without ``known``, which holds what became of equal jobs, no step is traced."""
    for name, data in made.files.items():
        (folder / name).write_bytes(data)
    stage: Any = "load"
    try:
        loaded = load_run(folder / made.config, made.settings)
        stage = "job"
        job = make_job(loaded)
        stage = "layout"
        layout = job.layout(job.abstract_devices())
        if known is None:
            return Seen("resolved")
        stage = "check"
        key = repr((layout, job.model, job.step_options(), job.config.optimizer, job.config.data, job.config.parallel))
        if key not in known:
            known[key] = _traced(job, layout)
        return known[key]
    except JaxparError as error:
        return _refused(stage, error)


def _refused(stage: Any, error: JaxparError) -> Seen:
    return Seen(stage, type(error).__name__, tuple(describe(error).split("\n")))


def _traced(job: Job, layout: jp.Layout) -> Seen:
    inputs: dict[str, Any] = {"batch": job.batch_spec(), "loss_fn": job.loss_fn, "step": job.step_options()}
    try:
        jp.check(layout, job.make_model, job.tx, strict=True, **inputs).to_text()
    except JaxparError as error:
        return _refused("check", error)
    return Seen("passed")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises :class:`TooSlow` after so many CPU seconds (or, on a busy machine, many more of the clock)."""

    def late(*_: Any) -> None:
        raise TooSlow

    clocks = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 60 * seconds)}
    old = {sig: signal.signal(sig, late) for sig, _ in clocks.values()}
    for clock, (_, limit) in clocks.items():
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for clock, (sig, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(sig, old[sig])


def memory(*, peak: bool = False) -> int:
    """The bytes that this process holds now, from where its peak is then counted, or the peak since."""
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def faults(seen: Seen) -> Iterator[str]:
    """What is wrong with the texts of an error."""
    for text in seen.texts:
        if len(text) > MOST_TEXT or not text.isprintable() or SECRET in text:
            yield f"an error of {len(text):,} characters: {text[:200]!r}"


def run(folder: Path, numbers: range, *, traced: int | None = None) -> Summary:
    """Tries the cases of these numbers; of ``traced`` cases, one traces its step too."""
    sandbox(folder)
    summary, known = Summary(), {}  # type: Summary, dict[str, Seen]
    before = os.getcwd()
    os.chdir(folder)
    try:
        for number in numbers:
            if number % 100 == 99:
                jax.clear_caches()
            _one(folder, number, summary, None if traced is None or number % traced else known)
    finally:
        os.chdir(before)
    return summary


def _one(folder: Path, number: int, summary: Summary, known: dict[str, Seen] | None) -> None:
    made, start, before = case(number), time.process_time(), memory()
    found, seen = list[str](), Seen("load", "finding")
    try:
        with warnings.catch_warnings(), limited(MOST_SECONDS):
            warnings.simplefilter("ignore")
            seen = attempt(folder, made, known)
        found += faults(seen)
    except (Exception, TooSlow) as error:  # noqa: BLE001 (these are what is looked for)
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/jaxpar/" in f.filename]
        at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        found.append(f"{type(error).__name__} at {at}: {str(error)[:150]!r}")
    seconds, peak = time.process_time() - start, memory(peak=True)
    if peak - before > MOST_BYTES:
        found.append(f"{(peak - before) / 2**20:,.0f} MiB of memory")
    summary.outcomes[f"{seen.stage}: {seen.outcome}"] += 1
    summary.peak_bytes = max(summary.peak_bytes, peak)
    summary.most_bytes = max(summary.most_bytes, (peak - before, f"case {number}"))
    summary.slowest = max(summary.slowest, (seconds, f"case {number}"))
    for text in found:
        summary.findings.append(f"case {number}, {seconds:.1f} s: {text}")
