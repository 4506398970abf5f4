"""Every error that jaxpar raises on purpose, and the helpers that word them.

An error text says what is wrong, where (such as the tensor's path), with which names and sizes, and the remedy. Each
class also derives from the built-in that a caller would expect (``ValueError``, ``OSError``, ...), so generic handlers
keep working.

>>> from jaxpar.errors import did_you_mean
>>> did_you_mean("hedas", ["heads", "embed"])
" Did you mean 'heads'?"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager


class JaxparError(Exception):
    """Base class of every error that jaxpar raises on purpose."""


class MeshError(JaxparError, ValueError):
    """A mesh cannot be built: an unknown axis, two ``-1``, or sizes whose product is not the number of devices."""


class RulesError(JaxparError, ValueError):
    """A rules table is not well formed: an unknown role, a dim listed twice, or a value that is not a rule."""


class LayoutError(JaxparError, ValueError):
    """The rules cannot place a tensor. ``problems`` lists every problem found, one text each.

    The message shows problems that differ only in their tensor as one.

    >>> causes = "the dim 'embed' has size 6", "the axis 'data' has size 1"
    >>> print(LayoutError([f"{path} [6] (embed): {causes[path == 'c']}" for path in "abc"]))
    3 problems, 2 causes:
    1. the dim 'embed' has size 6
       2 tensors: a [6] (embed); b [6] (embed)
    2. c [6] (embed): the axis 'data' has size 1
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        causes: dict[str, list[str]] = {}
        for text in self.problems:
            before, sep, cause = text.partition("): ")  # the dims of the tensor end here
            causes.setdefault(cause if sep else text, []).append(f"{before})" if sep else "")
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
            return
        head = (
            f"{len(self.problems)} problems{f', {_many(causes, "cause")}' if len(causes) < len(self.problems) else ''}"
        )
        shown = (_problem(cause, tensors) for cause, tensors in causes.items())
        super().__init__("\n".join([f"{head}:", *(f"{i}. {text}" for i, text in enumerate(shown, 1))]))


class AnnotationError(JaxparError, ValueError):
    """An annotation cannot be read: a name is neither a string nor ``None``, or the tagged value is not one array."""


class NoLayoutError(JaxparError, RuntimeError):
    """A function that needs the ambient layout ran outside ``with layout:``."""


class ModelError(JaxparError, TypeError):
    """``make_model`` or ``loss_fn`` returned a value that cannot be trained."""


class StateError(JaxparError, RuntimeError):
    """A step cannot take a state: ``init`` did not return it, or an earlier call has used up its arrays."""


class ConfigError(JaxparError, ValueError):
    """A configuration file or ``--set`` override is wrong: an unknown key, a wrong type, a duplicate, an unsafe tag."""


class DivergedError(JaxparError, ArithmeticError):
    """The loss or the gradients of a run were not finite for too many steps in a row."""


class DataError(JaxparError, ValueError):
    """Input data cannot be used: a missing folder, too little text, or a reading position of another run."""


class MissingExtraError(JaxparError, ImportError):
    """An optional dependency is not installed or too old. The text names the extra that installs it."""


class AuditError(JaxparError, ValueError):
    """A compiled program cannot be read: no HLO text, truncated text, or a form that the audit does not know."""


class CompileError(JaxparError, RuntimeError):
    """A program cannot be compiled ahead of time. The text holds the compiler's message."""


class PlanError(JaxparError, ValueError):
    """A plan needs a figure that is not known, or cannot exist.

    Examples are an unknown accelerator, a matmul rate that its table lacks, and more chips than a pod has.
    """


class ScheduleError(JaxparError, ValueError):
    """A pipeline schedule is not valid: sizes that do not fit, a deadlock, or work that is missing or done twice."""


class DiskError(JaxparError, OSError):
    """Optimizer state on disk cannot be used or stored.

    The folder is in use or belongs to another run or step, bytes are damaged, or the disk is full.
    """


class CheckpointError(JaxparError, OSError):
    """A checkpoint cannot be written, or does not fit.

    The manifest is missing, the tensors are those of another model, the folder is in use, or the disk is full.
    """


class DamagedError(CheckpointError):
    """A checkpoint is damaged: a flipped bit, a missing or swapped file, or a manifest that contradicts itself."""


class UnsavedError(CheckpointError):
    """A run ended, or was stopped, and its last step could not be saved."""


class LaunchError(JaxparError, RuntimeError):
    """The processes of a run cannot be started or found.

    The environment is incomplete, a port is in use, or the devices cannot be divided among the processes.
    """


class VerificationError(JaxparError, AssertionError):
    """A check failed: a layout does not compute what one device does, or a program has unexpected collectives."""


def allow_replication(dim: str) -> str:
    """Returns the setting that replicates a dim which the axes do not divide, in Python and in YAML.

    >>> allow_replication("batch")
    "indivisible={'batch': 'replicate'} (YAML: indivisible: {batch: replicate})"
    """
    return f"indivisible={{{dim!r}: 'replicate'}} (YAML: indivisible: {{{dim}: replicate}})"


def did_you_mean(name: object, options: Iterable[object]) -> str:
    """Returns `` Did you mean 'x'?`` for the closest option, or an empty text when nothing is close."""
    close = difflib.get_close_matches(str(name), [str(o) for o in options], n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: object, known: Iterable[str], plural: str = "") -> str:
    """Returns the text about a name that is not known: what it names, the closest known name, and all of them.

    >>> unknown("order", "zigzg", ["contiguous", "zigzag"])
    "unknown order 'zigzg'. Did you mean 'zigzag'? The orders are: contiguous, zigzag."
    """
    names = list(known)
    return f"unknown {what} {name!r}.{did_you_mean(name, names)} The {plural or f'{what}s'} are: {', '.join(names)}."


def listing(names: Iterable[object]) -> str:
    """Returns the names quoted and separated by commas, or ``none`` if there are none."""
    return ", ".join(repr(str(n)) for n in names) or "none"


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Puts ``prefix``, such as the key of a configuration, before the text of an error of jaxpar's own.

    >>> with prefixed("model."):
    ...     raise ConfigError("lora: rank must be at least 1, got 0.")
    Traceback (most recent call last):
    jaxpar.errors.ConfigError: model.lora: rank must be at least 1, got 0.
    """
    try:
        yield
    except JaxparError as error:
        raise type(error)(f"{prefix}{error}") from error


_SHOWN = 3
"""The number of tensors in the message of a problem that several have."""


def _problem(cause: str, tensors: Sequence[str]) -> str:
    if len(tensors) == 1:
        return f"{tensors[0]}: {cause}" if tensors[0] else cause
    more = f"; and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f"{cause}\n   {len(tensors)} tensors: {'; '.join(tensors[:_SHOWN])}{more}"


def _many(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) > 1 else ''}"
