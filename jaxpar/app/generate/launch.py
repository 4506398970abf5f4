"""``jaxpar generate`` as a single process, as one of several, or as the supervisor of several."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from jaxpar.app.config import Loaded, load_run
from jaxpar.app.generate.prompts import STDIN, read_prompts
from jaxpar.app.launch import heartbeat
from jaxpar.app.launch.cluster_detection import Cluster
from jaxpar.app.launch.exit_codes import ExitCode, end_process
from jaxpar.app.launch.join import ProcessPlace, place_of
from jaxpar.app.outputs import write_output
from jaxpar.app.train.launch import LaunchOptions, Task, policy_of, reporting, set_up_devices, supervise
from jaxpar.errors import JaxparError, LaunchError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxpar.app.generate.chat import Prompts
    from jaxpar.app.generate.generate import GenerateOptions
    from jaxpar.app.job import Job

_SHUTDOWN_TIMEOUT = 5.0
"""Maximum seconds that a process waits for the others when all of them end."""
_LAUNCH = ("processes", "coordinator", "process_count", "process_id", "config", "set")


def go(command: Any) -> int:
    """Generate, or supervise processes that generate; returns the exit status, which is 130 after Ctrl-C.

    Args:
      command: the command line's ``Generate``.

    Raises:
      LaunchError: processes cannot be started or found, or devices cannot be divided among them.
      JaxparError: as :func:`jaxpar.app.generate.generate.generate`.
    """
    loaded = load_run(command.config, command.set)
    options = LaunchOptions(command.processes, command.coordinator, command.process_count, command.process_id)
    if command.explain:
        return _explain(command, loaded)
    try:
        supervised = heartbeat.connect()
        count = options.processes if options.processes is not None else loaded.config.supervise.processes
        if count is not None and not supervised:
            return _supervise(command, loaded, options, count)
        cluster = place_of(options.coordinator, options.process_count, options.process_id)
        if cluster is None and not supervised:
            return _run_single(command, loaded)
        with reporting():
            return _run_distributed(command, loaded, cluster)
    except KeyboardInterrupt:
        _exit(0 if heartbeat.listened() else 130)


def _explain(command: Any, loaded: Loaded) -> int:
    """Print the sharding report, which does not depend on the number of processes."""
    set_up_devices(loaded.config, None)
    from jaxpar.app.generate.generate import generator
    from jaxpar.app.job import make_job

    job = make_job(loaded, training=False)
    texts = _prompts(command, job, _read(command) or [" "]).ids
    print(generator(job, texts, _options(command)).explain().to_text(), end="")
    return 0


def _run_single(command: Any, loaded: Loaded) -> int:
    from jaxpar.app.console import RunConsole

    set_up_devices(loaded.config, None)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the text may hold characters that the terminal cannot encode
    try:
        return _generate(command, loaded, sys.stdout, RunConsole(stderr=True))
    except BrokenPipeError:
        # The reader closed the pipe. Redirect stdout, because the interpreter flushes it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run_distributed(command: Any, loaded: Loaded, cluster: ProcessPlace | Cluster | None) -> int:
    """Generate in all processes; only process 0 prints."""
    from jaxpar.app.console import RunConsole

    with _reserve_stdout() as out:
        set_up_devices(loaded.config, cluster)
        import jax

        silent = jax.process_index() > 0
        file: Any = io.StringIO() if silent else _Lines() if heartbeat.listened() else sys.stderr
        console = RunConsole(file=file)
        if cluster is not None:
            console.print(f"launch  {cluster}")
        try:
            return _generate(command, loaded, io.StringIO() if silent else out, console)
        except LaunchError:
            raise
        except JaxparError:
            _shut_down_together()  # every process raises this error and must have time to report it
            raise


def _generate(command: Any, loaded: Loaded, out: TextIO, console: Console) -> int:
    """Generate in this process, together with the other processes of the run."""
    import jax

    from jaxpar.app.generate.generate import INTERRUPTED, generate
    from jaxpar.app.job import make_job
    from jaxpar.utils.multihost import gather, settled

    first, job = jax.process_index() == 0, settled(lambda: make_job(loaded, training=False))
    options = settled(lambda: _options(command))
    own_prompts = settled(lambda: _read(command, stdin=first))
    # Only process 0 reads standard input. Its prompts are sent to all, and compared like the other options.
    prompts_by_process = [json.loads(text) for text in gather(json.dumps(own_prompts).encode())]
    texts = prompts_by_process[0] if _reads_stdin(command) else own_prompts
    prompts = settled(lambda: _prompts(command, job, texts))
    if job.config.data.chat_template is not None and not command.chat:
        console.print("prompts are continued as text, but the run trains on conversations. Remedy: --chat")
    answers = generate(job, prompts, options, out=out, console=console)
    if first:
        write_output("--json", command.json, lambda: "".join(f"{answer.to_json()}\n" for answer in answers))
    if any(answer.why == INTERRUPTED for answer in answers):
        _exit(0 if heartbeat.listened() else 130)
    return 0


def _options(command: Any) -> GenerateOptions:
    from jaxpar.app.generate.generate import GenerateOptions
    from jaxpar.inference.sampling import Sampling

    sampling = Sampling(command.temperature, command.top_k, command.top_p)
    others = (command.stop, command.int8, command.checkpoint)
    return GenerateOptions(command.max_new_tokens, sampling, command.seed, command.cache, command.batch, *others)


def _prompts(command: Any, job: Job, prompts: list[Any]) -> Prompts:
    from jaxpar.app.generate.chat import chat_prompts, plain_prompts

    return chat_prompts(prompts, job) if command.chat else plain_prompts(prompts, job.tokenizer)


def _reads_stdin(command: Any) -> bool:
    return str(command.prompts) == STDIN


def _read(command: Any, *, stdin: bool = True) -> list[Any]:
    if command.prompts is None or (_reads_stdin(command) and not stdin):
        return list(command.prompt)
    return [*command.prompt, *read_prompts(command.prompts, chat=command.chat)]


def _supervise(command: Any, loaded: Loaded, options: LaunchOptions, count: int) -> int:
    """Start ``count`` processes, and end all of them when one fails."""
    policy = dataclasses.replace(policy_of(loaded.config), restarts=None, elastic=False, signalled=True)
    logs, status = Path(tempfile.mkdtemp(prefix="jaxpar-generate-")), int(ExitCode.FAILED)
    print_line = functools.partial(print, file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryFile() as stdin:
            if _reads_stdin(command) and not options.process_id:
                # The processes run in sessions of their own and cannot read from the terminal.
                shutil.copyfileobj(sys.stdin.buffer, stdin)
                stdin.seek(0)
            task = Task("generate", tuple(words(command)), 0, logs, stdin, print_line)
            status = supervise(command.config, command.set, loaded, options, policy, count, task)
    finally:
        if status == 0 or status > 128 or not any(log.stat().st_size for log in logs.iterdir()):
            shutil.rmtree(logs)
        else:
            print_line(f"the logs of the processes are in {logs}")
    return status


def words(command: Any) -> list[str]:
    """Returns a command's fields as command-line arguments, without those about processes and configuration.

    >>> @dataclasses.dataclass
    ... class Some:
    ...     prompt: tuple[str, ...] = ()
    ...     max_new_tokens: int = 128
    ...     int8: tuple[str, ...] | None = None
    >>> words(Some(("a", "--b"), 3, ("cache",)))
    ['--prompt=a', '--prompt=--b', '--max-new-tokens=3', '--int8', 'cache']
    """
    found = []
    for field in dataclasses.fields(command):
        value, name = getattr(command, field.name), f"--{field.name.replace('_', '-')}"
        if field.name in _LAUNCH or value == field.default:
            continue
        if field.name == "int8":
            found += [name, *value]
        elif isinstance(value, tuple):
            found += [f"{name}={one}" for one in value]
        else:
            found.append(name if value is True else f"{name}={value}")
    return found


class _Lines(io.TextIOBase):
    """A text stream that sends each line to the supervisor, which prints it."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            heartbeat.say(line)
        return len(text)


@contextmanager
def _reserve_stdout() -> Iterator[TextIO]:
    """Reserve standard output for generated text; other output to it, such as Gloo's, goes to standard error."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as out:
        os.dup2(2, 1)
        yield out


def _shut_down_together() -> None:
    """Shut down together with the other processes, which would else report this one as dead.

    Gives up after ``_SHUTDOWN_TIMEOUT`` seconds.
    """

    def shut() -> None:
        import jax

        with suppress(RuntimeError):
            jax.distributed.shutdown()

    thread = threading.Thread(target=shut, daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_TIMEOUT)


def _exit(status: int) -> NoReturn:
    """End this process even if one of its threads still compiles or waits for other processes."""
    if "jax" in sys.modules:
        _shut_down_together()
    end_process(status)
