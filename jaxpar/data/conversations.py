"""Instruction data: conversations as tokens, with a loss on the answers only.

A row of a jsonl file is ``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}``, or
``{"prompt": ..., "completion": ...}``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpar.data.bad_rows import BadRow, BadRows
from jaxpar.data.chat_template import ANSWER, ChatTemplate
from jaxpar.data.conversation_rows import messages_of, special_token, template_values, unfit
from jaxpar.data.documents import ReadOptions, find_documents
from jaxpar.data.packing import best_fit, packed_row
from jaxpar.data.rows import jsonl_objects
from jaxpar.data.sources import check_fraction, check_parts, is_heldout
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.errors import DataError

type Example = dict[str, npt.NDArray[np.int32]]
"""Arrays int32 [seq]: ``tokens``, ``targets``, which are the tokens shifted by one, and ``loss_mask``: 1 where a target
belongs to an answer."""
_DAY = datetime(2024, 7, 26)
"""The day that ``strftime_now`` tells in training: the default of templates for systems without a clock."""


class Conversations(Sequence[Example]):
    """Conversations as rows of ``seq`` tokens; shorter ones are padded, longer ones cut.

    Args:
      rows: ids [n] and answers [n] (bool) of each conversation.
      seq: tokens of a row.
      pad: the id of padding, which has no loss.
    """

    def __init__(self, rows: Sequence[tuple[np.ndarray, np.ndarray]], seq: int, pad: int):
        self._rows, self._seq, self._pad = rows, seq, pad

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Conversations(self._rows[index], self._seq, self._pad)
        ids, answers = self._rows[index]
        row, mask = np.full(self._seq + 1, self._pad, np.int32), np.zeros(self._seq + 1, np.int32)
        count = min(len(ids), self._seq + 1)
        row[:count], mask[:count] = ids[:count], answers[:count]
        return {"tokens": row[:-1], "targets": row[1:], "loss_mask": mask[1:]}


class PackedConversations(Sequence[Example]):
    """Rows of ``seq`` tokens that hold as many whole conversations as fit; longer ones are cut.

    An example also has ``segment_ids``, 0, 1, ... for the conversations of its row, between which no token attends, and
    ``positions``, from 0 in each. The rest of a row is padding, with a segment of its own and no loss.

    Args:
      rows: ids [n] and answers [n] (bool) of each conversation.
      seq: tokens of a row.
      pad: the id of padding.
      alone: one conversation in a row.

    >>> conversations = [(np.arange(n), np.arange(n) > 1) for n in (4, 6, 3)]
    >>> packed = PackedConversations(conversations, seq=8, pad=9)
    >>> len(packed), packed[0]["tokens"].tolist(), packed[0]["segment_ids"].tolist()
    (2, [0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1, 1, 1])
    >>> packed[1]["tokens"].tolist(), packed[1]["loss_mask"].tolist()
    ([0, 1, 9, 9, 9, 9, 9, 9], [0, 1, 0, 0, 0, 0, 0, 0])
    """

    def __init__(self, rows: Sequence[tuple[np.ndarray, np.ndarray]], seq: int, pad: int, *, alone: bool = False):
        self._rows, self._seq, self._pad = rows, seq, pad
        lengths = np.array([min(len(ids) - 1, seq) for ids, _ in rows], np.int64)
        placed = np.arange(len(lengths)) if alone else best_fit(lengths, seq)
        self._order = np.argsort(placed, kind="stable")
        self._starts = np.searchsorted(placed[self._order], np.arange(int(placed.max(initial=-1)) + 2))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        members = (self._rows[i] for i in self._order[self._starts[row] : self._starts[row + 1]])
        most = self._seq + 1
        return packed_row([(ids[:most], answers[1:most]) for ids, answers in members], self._seq, self._pad)


@dataclass(frozen=True)
class ConversationData:
    """Conversations to train on and to evaluate on.

    Attributes:
      name: of the source.
      train, heldout: the rows.
      conversations: how many conversations there are to train on, and to evaluate on.
      truncated: how many are longer than a row.
      bad: the rows that were left out, in words; empty if there are none.
    """

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    conversations: tuple[int, int]
    truncated: int = 0
    bad: str = ""

    def identity(self) -> dict[str, int | str]:
        """Returns hashes of all rows, to train on and held out."""
        return {"content": rows_hash(self.train), "held-out content": rows_hash(self.heldout)}


def rows_hash(rows: Sequence[Example]) -> str:
    """Returns a hash of the arrays of all rows.

    >>> rows_hash([{"tokens": np.arange(3, dtype=np.int32)}])
    'sha256:efa7ea608ec43394'
    """
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            digest.update(name.encode() + np.ascontiguousarray(row[name], "<i4").tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def load_conversations(
    source: str | os.PathLike[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    seq: int,
    bad_rows: Literal["error", "skip"] = "error",
    heldout_fraction: float = 0.05,
    seed: int = 0,
    packed: bool = False,
) -> ConversationData:
    """Returns the conversations of a jsonl file, or of those of a folder.

    Args:
      source: the file or folder. ``weight: 0`` of an answer leaves it out of the loss. Other keys of a row are values
        for the template: those that it reads, and those in ``chat_template_kwargs``. ``tools`` that it does not read
        are an error; further keys, such as ``id``, change nothing.
      tokenizer: makes the ids. The names of special tokens are tokens where the template writes them, and an error in a
        message, which could end its own turn with them.
      template: makes the text. ``strftime_now`` tells a fixed day unless ``template.now`` is set, so that all
        processes and later parts of a run have the same tokens.
      seq: tokens of a row; of a longer conversation the beginning.
      bad_rows: ``error``, or ``skip``: rows that hold no conversation, that the template refuses, or none of whose
        answers is in the first ``seq`` tokens, are counted and reported.
      heldout_fraction, seed: which conversations are held out, as for :func:`jaxpar.data.load_text`.
      packed: a row to train on holds as many conversations as fit, told apart by ``segment_ids``; one to evaluate on
        holds one, with the same arrays.

    Raises:
      DataError: there is no such file; a row holds no conversation; the template refuses one; or a part has none.
      MissingExtraError: the package ``jinja2`` is not installed.
    """
    check_fraction(heldout_fraction)
    files, bad = find_documents(source, ReadOptions(format="jsonl")), BadRows(bad_rows)
    template = template if template.now is not None else replace(template, now=_DAY)
    parts: dict[bool, list[tuple[np.ndarray, np.ndarray]]] = {False: [], True: []}
    truncated = 0
    for relative, path in files.files:
        for number, row, _ in jsonl_objects(path):
            found = row if isinstance(row, BadRow) else _encoded(row, tokenizer, template, seq)
            if isinstance(found, BadRow):
                bad.add(f"{path} row {number}", found)
                continue
            truncated += len(found[0]) > seq + 1
            parts[is_heldout(f"{relative}:{number}", heldout_fraction, seed)].append(found)
    train, heldout = parts[False], parts[True]
    check_parts(files.name, len(train), len(heldout), fraction=heldout_fraction, seed=seed, unit="rows")
    pad, counts = tokenizer.eos, (len(train), len(heldout))
    to_train: Sequence[Example] = Conversations(train, seq, pad)
    to_evaluate: Sequence[Example] = Conversations(heldout, seq, pad)
    if packed:
        to_train = PackedConversations(train, seq, pad)
        to_evaluate = PackedConversations(heldout, seq, pad, alone=True)
    return ConversationData(files.name, to_train, to_evaluate, counts, truncated, bad.describe())


class ConversationPrompt(NamedTuple):
    """What asks a model for the next answer of a conversation.

    Attributes:
      text: as the template renders it.
      ids: its tokens [n], those before this answer in training.
      end: what ends the answer; often the name of a special token.
    """

    text: str
    ids: list[int]
    end: str


def conversation_prompt(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    row: Mapping[str, Any] | None = None,
) -> ConversationPrompt:
    """Returns what asks for the next answer of a conversation, in the tokens of :func:`load_conversations`.

    Args:
      messages: the messages so far, each with ``role`` and ``content``, the last of which is no answer.
      tokenizer, template: as for :func:`load_conversations`.
      row: other keys of the conversation, such as ``tools``, as in a row of :func:`load_conversations`.

    Raises:
      DataError: there is no message, the last one is an answer, one contains a special token's name; or as for
        :meth:`ChatTemplate.prompt`.
      MissingExtraError: the package ``jinja2`` is not installed.

    >>> from jaxpar.data import load_tokenizer
    >>> chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
    ...                     "{% if add_generation_prompt %}assistant: {% endif %}")
    >>> conversation_prompt([{"role": "user", "content": "2 + 2?"}], load_tokenizer(), chat).text
    'user: 2 + 2?\\nassistant: '
    """
    bad = unfit(messages)
    values = bad or template_values(row or {}, template)
    bad = values if isinstance(values, BadRow) else special_token(messages, values, tokenizer)
    if isinstance(values, BadRow) or bad is not None:
        assert bad is not None
        raise DataError(f"{bad.reason}. Remedy: {bad.remedy or 'correct the messages'}.")
    if messages[-1]["role"] == ANSWER:
        raise DataError(f"the last message has the role {ANSWER!r}. Remedy: end with the message to be answered.")
    text, end = template.prompt(messages, values)
    return ConversationPrompt(text, tokenizer.encode_rendered(text)[0].tolist(), end)


def _encoded(
    row: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate, seq: int
) -> tuple[np.ndarray, np.ndarray] | BadRow:
    """Returns the ids of a conversation, and which of them belong to answers."""
    messages = messages_of(row)
    if isinstance(messages, BadRow):
        return messages
    values = template_values(row, template)
    if isinstance(values, BadRow):
        return values
    if (bad := special_token(messages, values, tokenizer)) is not None:
        return bad
    try:
        rendered = template.render(messages, values)
    except DataError as error:
        reason, _, remedy = str(error).partition(" Remedy: ")
        return BadRow(reason.removesuffix("."), remedy.removesuffix("."))
    ids, starts = tokenizer.encode_rendered(rendered.text)
    answers = np.zeros(len(ids), bool)
    for start, end in rendered.answers:
        answers |= (starts >= start) & (starts < end)
    if not answers[1 : seq + 1].any():
        return BadRow(f"no answer begins in its first {seq} tokens", "a larger data.seq")
    return ids, answers
