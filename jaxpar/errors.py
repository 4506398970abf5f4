"""Every error jaxpar raises on purpose, and the helpers that word them.

An error says what is wrong, where (the tensor's path), with which names and sizes, and what to do.
Each class also derives from the built-in a caller would expect (``ValueError``, ``KeyError``, ...), so that
generic handlers keep working.

>>> from jaxpar.errors import did_you_mean
>>> did_you_mean("hedas", ["heads", "embed"])
" Did you mean 'heads'?"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class JaxparError(Exception):
    """Base class: catch it to catch everything that jaxpar raises on purpose."""


class MeshError(JaxparError, ValueError):
    """A mesh cannot be built: wrong axis, two ``-1``, or a product that is not the number of devices."""


class RulesError(JaxparError, ValueError):
    """A rules table is not well formed: unknown role, duplicate dim, not a rule value."""


class LayoutError(JaxparError, ValueError):
    """A tensor cannot be laid out by the rules. ``problems`` lists every offence found, one text each."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"{i}. {p}" for i, p in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems:\n{lines}")


class AnnotationError(JaxparError, ValueError):
    """An annotation cannot be read: a name is neither a string nor ``None``, or what it tags is not one array."""


class NoLayoutError(JaxparError, RuntimeError):
    """A function that needs the ambient layout ran outside ``with layout:``."""


class ModelError(JaxparError, TypeError):
    """``make_model`` or ``loss_fn`` returned something that cannot be trained."""


class ConfigError(JaxparError, ValueError):
    """A configuration file or a ``--set`` override is wrong: unknown key, wrong type, duplicate, unsafe tag."""


class DivergedError(JaxparError, ArithmeticError):
    """A run's loss or gradients were not finite for too many steps in a row."""


class DataError(JaxparError, ValueError):
    """Input data cannot be used: missing folder, too little text, a position of another run."""


class MissingExtraError(JaxparError, ImportError):
    """An optional dependency is not installed. The text names the extra that brings it."""


class AuditError(JaxparError, ValueError):
    """A compiled program cannot be read: no HLO text, text cut short, or a form the auditor does not know."""


class CompileError(JaxparError, RuntimeError):
    """A program cannot be compiled ahead of time; the text holds the compiler's own words."""


class PlanError(JaxparError, ValueError):
    """A plan asks for what is not known: an accelerator or a matmul rate that no table holds, more chips than a pod has."""


class ScheduleError(JaxparError, ValueError):
    """A pipeline's schedule cannot be: sizes that do not fit, an order that waits for itself, work left out or done twice."""


class DiskError(JaxparError, OSError):
    """An optimizer's state on disk cannot be used or kept: a folder in use, of another run or step, damaged bytes, a full disk."""


class CheckpointError(JaxparError, OSError):
    """A checkpoint cannot be written, or does not fit: no manifest, tensors of another model, a folder in use, a full disk."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written: a flipped bit, a missing or swapped file, a manifest that contradicts itself."""


class LaunchError(JaxparError, RuntimeError):
    """A run's processes cannot be started or found: an environment half set, a port in use, devices that cannot be shared out."""


class VerificationError(JaxparError, AssertionError):
    """A layout does not compute what one device computes."""


def did_you_mean(name: object, options: Iterable[object]) -> str:
    """`` Did you mean 'x'?`` for the closest option, or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(name), [str(o) for o in options], n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(names: Iterable[object]) -> str:
    """Names as a reader wants them: quoted, comma-separated, ``none`` when there are none."""
    return ", ".join(repr(str(n)) for n in names) or "none"


def need(module: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for a missing optional dependency."""
    return MissingExtraError(
        f"{purpose} needs the package {module!r}, which is not installed. Remedy: pip install 'jaxpar[{extra}]'."
    )
