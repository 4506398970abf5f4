"""A process that runs cases: one JSON request per line of its input, one JSON answer per line of its output."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .cases import InvalidCase, Outcome, family, parsed

TEXT = 1200
"""The number of characters of an exception that are kept."""


def evaluated(name: str, case: Any) -> Outcome:
    """Run one case. Exceptions of the library's own types are refusals, and every refusal must name a remedy."""
    from jaxpar.errors import JaxparError

    try:
        outcome: Outcome = family(name).run(case).outcome
    except InvalidCase as error:
        return Outcome("invalid", str(error))
    except JaxparError as error:
        text = f"{type(error).__name__}: {error}"[:TEXT]
        return Outcome("refused" if "Remedy" in str(error) else "unremedied", text)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is this case's outcome)
        return Outcome("raised", f"{type(error).__name__}: {str(error)[:TEXT]} (at {_place(error)})")
    return outcome


def _place(error: BaseException) -> str:
    """The last line of the library that an exception passed through, else the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}jaxpar{os.sep}" in f.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Run the requested case and return its outcome."""
    name = request["family"]
    case = parsed(name, request["case"])
    begun = time.process_time()
    outcome = evaluated(name, case)
    return {"seconds": time.process_time() - begun, **asdict(outcome)}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    for line in requests:
        answers.write(json.dumps(answered(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """Prepare the process, reserve its output for answers, and serve."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything that libraries print goes to stderr
    from jaxpar.utils.simulate_devices import simulate_devices

    simulate_devices(8)
    # Programs run once: optimizing them takes longer than running them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    import warnings

    warnings.simplefilter("ignore")
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
