"""The program that renders chat templates for :mod:`jaxpar.data.template_process`, in a process with limits.

A template is a program of somebody else. jinja2's sandbox keeps it from Python's objects, but not from endless loops
and texts that fill the memory. The program reads a JSON object per line: first the template, then requests. It imports
nothing of jaxpar, so that it starts at once.
"""

from __future__ import annotations

import json
import random
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

MOST_CHARACTERS = 1 << 26
"""Of one text."""
_MARK = secrets.token_hex(16)  # no message contains it
_BEGIN, _END = f"<{_MARK}>", f"</{_MARK}>"


def serve() -> None:
    """Answers requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = iter(sys.stdin.readline, "")
    opening = json.loads(next(lines))
    with suppress(ValueError, OSError):  # the system has a lower limit, or none
        resource.setrlimit(resource.RLIMIT_AS, (opening["memory"], opening["memory"]))
    limited = partial(_limited, opening["seconds"], opening["memory"])
    reply = limited(partial(_opened, opening))
    template = reply.pop("template", None)
    _write(reply)
    for line in lines:
        request = json.loads(line)
        for values in request["texts"]:
            messages = request["messages"][: values.pop("count")] + values.pop("more")
            shared = {**request["values"], **values, "messages": messages}
            _write(limited(partial(_rendered, template, shared)))


def _limited(seconds: float, memory: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a function returns, or its error. The system ends this process if it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        reply = make()
    except MemoryError:
        reply = {"memory": memory}
    except Exception as error:  # noqa: BLE001 (a template can raise anything)
        reply = {"error": f"{type(error).__name__}: {str(error).rstrip('.'):.200}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    return reply


def _opened(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the template; the reply has the names of the values that it reads, and whether it marks answers."""
    import jinja2
    import jinja2.ext
    import jinja2.meta
    import jinja2.nodes
    import jinja2.sandbox

    class AnswerTag(jinja2.ext.Extension):
        """``{% generation %}``, with which a template marks answers: for transformers, and here."""

        tags = {"generation"}  # noqa: RUF012 (the name that jinja2 reads)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # the arguments and their order are those of transformers
        how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    now = None if request["now"] is None else datetime.fromisoformat(request["now"])
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AnswerTag, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: (now or datetime.now()).strftime(format)
    environment.filters["tojson"] = tojson
    try:
        tree = environment.parse(request["source"])
        reads = jinja2.meta.find_undeclared_variables(tree) - environment.globals.keys()
        template = environment.from_string(request["source"])
    except jinja2.TemplateError as error:
        return {"syntax": f"{error!s:.200}"}
    marks = any("AnswerTag" in node.identifier for node in tree.find_all(jinja2.nodes.ExtensionAttribute))
    return {"template": template, "reads": sorted(reads), "marks": marks}


def _rendered(template: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Renders a text; the reply has the ranges that the template marks as answers, without the marks."""
    random.seed(0)  # the tokens of a row are the same in every process
    parts, size = list[str](), 0
    for part in template.generate(**values):
        parts.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            return {"characters": MOST_CHARACTERS}
    begins, spans, text = list[int](), list[tuple[int, int]](), ""
    for piece in re.split(f"(</?{_MARK}>)", "".join(parts)):
        if piece == _BEGIN:
            begins.append(len(text))
        elif piece == _END:
            spans.append((begins.pop(), len(text)))
        else:
            text += piece
    text.encode()  # an error if the template makes half of a character
    return {"text": text, "spans": sorted(spans)}


def _write(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
