"""The exit status of a run: what its scheduler may conclude from it, such as whether to start it again."""

from __future__ import annotations

import enum
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import NoReturn, Self

from jaxpar.errors import (
    AuditError,
    CompileError,
    ConfigError,
    DamagedError,
    DivergedError,
    JaxparError,
    LaunchError,
    UnsavedError,
    VerificationError,
)
from jaxpar.utils.durable import is_permanent
from jaxpar.utils.terminal import say

_LOST_PEER = ("coordination service", "Connection closed by peer", "Connection reset by peer", "Socket closed",
              "heartbeat timeout", "Gloo", "gloo", "UNAVAILABLE", "preempted")  # fmt: skip
"""Words in errors that a process raises because another one failed."""
_MOST = 2000
"""Maximum characters on the screen of an unexpected error, or of a line of an error of jaxpar's own."""


class ExitCode(enum.IntEnum):
    """The exit statuses of ``jaxpar train``; each has a ``meaning``, which the run prints in its last line.

    >>> ExitCode.RETRYABLE, ExitCode.RETRYABLE.meaning
    (<ExitCode.RETRYABLE: 75>, 'a peer, a device or storage failed; a new start may succeed')
    """

    meaning: str
    """What it says about a run."""

    def __new__(cls, status: int, meaning: str = "") -> Self:
        """Adds the meaning to a status."""
        found = int.__new__(cls, status)
        found._value_, found.meaning = status, meaning
        return found

    FINISHED = 0, "finished and saved"
    FAILED = 1, "failed; a new start would fail too"
    CONFIGURATION = 2, "the configuration or the command line is wrong"
    GAVE_UP = 69, "gave up after its restarts or rollbacks"
    NOT_SAVED = 74, "ended, and its last steps are not saved"
    RETRYABLE = 75, "a peer, a device or storage failed; a new start may succeed"
    STOPPED = 85, "stopped by a signal, and saved"
    INTERRUPTED = 130, "stopped by Ctrl-C, and saved"


ENDED_WELL = (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.INTERRUPTED)
"""The statuses of a process that saved everything: it finished, or a signal stopped it."""


def exit_code(error: BaseException) -> ExitCode:
    """Returns the exit status for an error that ends a command.

    >>> from jaxpar.errors import LayoutError
    >>> exit_code(LayoutError("...")).name, exit_code(OSError(5, "Input/output error")).name, exit_code(KeyError()).name
    ('CONFIGURATION', 'RETRYABLE', 'FAILED')
    """
    match error:
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case UnsavedError():
            return ExitCode.NOT_SAVED
        case DivergedError():
            return ExitCode.GAVE_UP
        case DamagedError() | CompileError() | AuditError() | VerificationError():
            return ExitCode.FAILED
        case ConfigError():
            return ExitCode.CONFIGURATION
        case LaunchError():
            # Raised because of another error, it is about a port, a peer or a cluster; otherwise about the options.
            return ExitCode.CONFIGURATION if next(_causes(error), None) is None else ExitCode.RETRYABLE
        case JaxparError():
            return ExitCode.RETRYABLE if any(map(_of_storage, _causes(error))) else ExitCode.CONFIGURATION
    return ExitCode.RETRYABLE if _of_storage(error) or lost_peer(str(error)) else ExitCode.FAILED


def lost_peer(text: str) -> bool:
    """Returns whether an error's text says that another process failed."""
    return any(word in text for word in _LOST_PEER)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to an error, without those that jaxpar raised and those of looking up a name or a value."""
    found = error.__cause__ or error.__context__
    while found is not None:
        if not isinstance(found, JaxparError | LookupError | ValueError):
            yield found
        found = found.__cause__ or found.__context__


def _of_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, JaxparError) and not is_permanent(error)


def signal_code(number: int) -> ExitCode:
    """Returns the exit status of a run that a signal stopped after it had saved everything."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.STOPPED


def describe(error: BaseException) -> str:
    """Returns what a command prints about the error that ends it.

    An error that jaxpar did not raise on purpose is shortened, with the line that raised it; its full traceback goes to
    a file that the text names.
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    text = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in str(error)).strip()
    if isinstance(error, JaxparError):
        return f"{type(error).__name__}: {'\n'.join(map(_shortened, in_yaml(text).split('\n')))}"
    text = _shortened(text)
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"raised at {frame[0].filename}:{frame[0].lineno}, in {frame[0].name}. " if frame else ""
    head = f"{type(error).__name__}{': ' if text else ''}{text}\n{where}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="jaxpar-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return f"{''.join(traceback.format_exception(error))}{head}"
    return f"{head}The full traceback is in {file.name}."


def in_yaml(text: str) -> str:
    """Returns an error's text for a person who writes YAML: of a remedy in Python and in YAML, only the second.

    >>> in_yaml("leave it unsharded: indivisible={'batch': 'replicate'} (YAML: indivisible: {batch: replicate}).")
    'leave it unsharded: rules: {indivisible: {batch: replicate}}.'
    """
    text = re.sub(r"indivisible=\{[^}]*\} \(YAML: (indivisible: \{[^}]*\})\)", r"rules: {\1}", text)
    return re.sub(r"(\w+)=(?:(?! \(YAML: )[^\n])* \(YAML: (\1: [^\n]*?[]}])\)", r"\2", text)


def _shortened(text: str) -> str:
    """The text without its middle if it is too long: an error ends with its remedy."""
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"


def report(error: BaseException) -> ExitCode:
    """Print the error that ends a command to standard error; returns the exit status."""
    say(describe(error), file=sys.stderr)
    return exit_code(error)


def end_process(status: int) -> NoReturn:
    """Ends this process at once, even if one of its threads still compiles or waits for other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def last_line(status: int) -> str:
    """Returns the last line of a run, with its exit status.

    >>> last_line(85)
    'exit 85: stopped by a signal, and saved'
    """
    return f"exit {int(status)}: {ExitCode(status).meaning}"
