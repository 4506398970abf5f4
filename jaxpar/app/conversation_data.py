"""Conversations as the data of a run: ``data: {source: chat.jsonl, chat_template: tokenizer.json}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.app.config import RunConfig
from jaxpar.data.chat_template import load_chat_template
from jaxpar.data.conversations import ConversationData, load_conversations
from jaxpar.data.examples import ExamplePlan
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.errors import ConfigError

PACKED = "documents"
"""The value of ``data.packing`` with which a row holds several conversations."""


def check_conversations(config: RunConfig) -> None:
    """Raise a ConfigError if settings of a run exclude conversations."""
    data, context = config.data, config.parallel.context
    balance = None if context is None else context.load_balance
    if data.chat_template is None:
        return
    if data.packing not in (False, PACKED):
        shown = str(data.packing).lower()
        raise ConfigError(
            f"data.chat_template makes a row of each conversation, or packs several into one, and packing: {shown} "
            "does neither. Remedy: packing: documents, or leave data.packing out."
        )
    for key, excluded in (("data.blend", bool(data.blend)), ("parallel.context.load_balance", balance == "balanced")):
        if excluded:
            raise ConfigError(
                f"data.chat_template makes rows of conversations, which {key} does not support. Remedy: leave {key} "
                "out."
            )


def run_conversations(config: RunConfig, tokenizer: Tokenizer) -> ConversationData:
    """Returns the conversations of a run.

    Raises:
      DataError: as :func:`jaxpar.data.load_conversations` and :func:`jaxpar.data.load_chat_template`.
    """
    data = config.data
    template = load_chat_template(data.chat_template or "")
    options: dict[str, Any] = {name: getattr(data, name) for name in ("seq", "bad_rows", "heldout_fraction")}
    return load_conversations(data.source, tokenizer, template, packed=data.packing == PACKED, **options)


def conversation_plans(
    found: ConversationData, batch: int, process: Mapping[str, int]
) -> tuple[ExamplePlan, ExamplePlan]:
    """Returns the batches of one process to train on and to evaluate on."""
    parts = ((found.name, found.train), (f"{found.name} (heldout)", found.heldout))
    train, heldout = (ExamplePlan(f"data: {name}", rows, batch, **process) for name, rows in parts)
    return train, heldout


def describe(found: ConversationData, config: RunConfig) -> str:
    """Returns a line about the conversations."""
    train, heldout = found.conversations
    packed = f" in {len(found.train):,} rows" if config.data.packing == PACKED else ""
    line = (
        f"{found.name}: {train:,} conversations to train on{packed}, {heldout:,} held out; batch "
        f"{config.data.batch} × {config.data.seq} tokens, with a loss on answers"
    )
    line += f"; {found.truncated:,} are longer, and cut" if found.truncated else ""
    return f"{line}; {found.bad}" if found.bad else line
