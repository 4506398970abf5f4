"""Prompts of ``jaxpar generate``: texts to continue, or conversations to answer (``--chat``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.app.generate.prompts import as_tokens
from jaxpar.data.chat_template import load_chat_template
from jaxpar.data.conversations import conversation_prompt
from jaxpar.data.tokenizer import Tokenizer, TokenizerConfig
from jaxpar.errors import ConfigError, prefixed

if TYPE_CHECKING:
    from jaxpar.app.job import Job


@dataclass(frozen=True)
class Prompts:
    """What a model is to continue.

    Attributes:
      texts: of each prompt; of a conversation, as its template renders it.
      ids: the tokens of each.
      stop_tokens: tokens that end a text, beside the one that ends a document.
      stop: strings that end a text.
    """

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def plain_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> Prompts:
    """Returns texts to continue.

    Raises:
      ConfigError: as for :func:`jaxpar.app.generate.prompts.as_tokens`.
    """
    return Prompts(tuple(prompts), tuple(as_tokens(number, prompt, tokenizer) for number, prompt in enumerate(prompts)))


def chat_prompts(prompts: Sequence[Any], job: Job) -> Prompts:
    """Returns conversations to answer, in the tokens with which the run trains on conversations.

    An answer ends with what the template writes after one: a special token is a token that ends it, any other text a
    string.

    Args:
      prompts: texts of a user, lists of messages, or objects with ``messages``.
      job: the run.

    Raises:
      ConfigError: the run has neither a chat template nor a tokenizer beside which one can be, or these are no
        messages; with the number of the prompt.
      DataError: the template cannot be read, refuses the messages or fails.
    """
    template, tokenizer = load_chat_template(_template_file(job)), job.tokenizer
    rendered, ends = [], dict[str, None]()
    for number, prompt in enumerate(prompts):
        with prefixed(f"generate: prompt {number}: "):
            row = prompt if isinstance(prompt, dict) else {}
            one = conversation_prompt(_messages(prompt), tokenizer, template, row=row)
        rendered.append(one)
        ends[one.end] = None
    special = {end: next((s for s in tokenizer.special_tokens if end.startswith(s)), None) for end in ends}
    tokens = {int(tokenizer.encode_rendered(name)[0][0]) for name in special.values() if name is not None}
    strings = tuple(end for end, name in special.items() if end and name is None)
    return Prompts(
        tuple(one.text for one in rendered), tuple(one.ids for one in rendered), tuple(sorted(tokens)), strings
    )


def _template_file(job: Job) -> str:
    """The run's template, or the tokenizer of a run on text, such as ``jaxpar import`` writes."""
    data = job.config.data
    file = data.tokenizer.file if isinstance(data.tokenizer, TokenizerConfig) else data.tokenizer
    if data.chat_template is None and file is None:
        raise ConfigError(
            "generate --chat: the run has neither data.chat_template nor a data.tokenizer beside which a template is. "
            "Remedy: --set data.chat_template=FILE, a chat template, or the tokenizer.json beside it."
        )
    return data.chat_template or file or ""


def _messages(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt.get("messages") if isinstance(prompt, dict) else prompt
