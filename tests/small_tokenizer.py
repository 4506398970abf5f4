"""A ``tokenizer.json`` of byte pairs, trained on a short text by the package ``tokenizers``, and rows to read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

EOS, BEGIN = "<|endoftext|>", "<s>"
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "lay",
    "on",
    "the",
    "log",
    "while",
    "rain",
    "fell",
    "on",
    "the",
    "roof",
    "of",
    "the",
    "barn",
]


def save_tokenizer(folder: Path, *, vocab: int = 300, begin: bool = False) -> Path:
    """Train a tokenizer and returns its file; with ``begin`` each text starts with a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def sentences(count: int) -> list[str]:
    """Returns ``count`` sentences of different lengths."""
    return [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 9)) + f" {i}." for i in range(count)]


def write_jsonl(file: Path, texts: Iterable[str]) -> Path:
    """Write a jsonl file, one row for each text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return file
