"""Tokenizers: what is encoded, what text comes back token by token, and what their errors say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises
from small_tokenizer import BEGIN, EOS, save_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxpar.data import ChatTemplate, TokenizerConfig, load_tokenizer
from jaxpar.errors import DataError, MissingExtraError

TEXTS = ["the cat sat", "naïve 日本語 🙂 text", "a" * 50, f"a {EOS} inside"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_documents_are_encoded_as_the_package_encodes_them_and_end_with_eos(file: Path) -> None:
    inner, ours = Tokenizer.from_file(str(file)), load_tokenizer(file)
    for text, ids in zip(TEXTS[:3], ours.encode([text.encode() for text in TEXTS[:3]]), strict=True):
        assert ids.tolist() == [*inner.encode(text).ids, inner.token_to_id(EOS)]
        assert ids.dtype == np.uint16
    assert (ours.vocab, ours.eos) == (inner.get_vocab_size(), inner.token_to_id(EOS))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_tokens_become_the_text_again_one_at_a_time(text: str, kind: str, file: Path) -> None:
    tokenizer = load_tokenizer(None if kind == "bytes" else file)
    decoder, seen = tokenizer.decoder(), ""
    for token in tokenizer.encode_prompt(text):
        new = decoder.add(token)
        assert "\ufffd" not in new
        seen += new
    assert seen + decoder.end() == text


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_an_incomplete_character_ends_as_a_replacement(kind: str, file: Path) -> None:
    tokenizer = load_tokenizer(None if kind == "bytes" else file)
    decoder = tokenizer.decoder()
    ids = tokenizer.encode_prompt("a日")
    assert "".join(map(decoder.add, ids[:-1])) + decoder.end() in ("a\ufffd", "a")
    assert decoder.end() == ""


def test_a_special_token_in_a_document_is_text_unless_it_is_to_be_parsed(file: Path) -> None:
    text, parsed = load_tokenizer(file), load_tokenizer(TokenizerConfig(str(file), special="parse"))
    document = f"a {EOS} b".encode()
    assert text.encode([document])[0].tolist().count(text.eos) == 1
    assert parsed.encode([document])[0].tolist().count(text.eos) == 2
    assert text.digest != parsed.digest


def test_a_token_at_the_beginning_stays_and_truncation_and_padding_do_not(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, begin=True)
    inner = Tokenizer.from_file(str(file))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(file))
    ours = load_tokenizer(file)
    long = "the cat sat on the mat and the dog lay on the log"
    (ids,) = ours.encode([long.encode()])
    assert ids[0] == inner.token_to_id(BEGIN) and ids[-1] == ours.eos and 8 < len(ids) < 64
    assert ours.encode_prompt(long) == ids[:-1].tolist()


SPECIAL = ("<s>", "</s>", "[CLS]", "[SEP]", "<|user|>", "<|end|>")
CHAT = "<s>{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
POST_PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "begin": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
    "begin and end": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
    "template": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "sequence": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    ),
}
DOCUMENTS = {
    "none": "h i < s > </s>",
    "bytes": "h i < s > </s>",
    "begin": "<s> h i < s > </s>",
    "begin and end": "<s> h i < s > </s>",
    "template": "[CLS] h i < s > [SEP] </s>",
    "sequence": "<s> h i < s > </s>",
}
"""The tokens of the document ``hi<s>``, whose ``<s>`` is text."""


@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_each_way_in_gives_the_tokens_that_transformers_gives(kind: str, tmp_path: Path) -> None:
    """A text has what the post-processor adds, and a rendered text has nothing twice, in training and in a prompt."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *characters])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(list(SPECIAL))
    inner.post_processor = POST_PROCESSORS[kind]
    inner.save(str(tmp_path / "tokenizer.json"))
    text = load_tokenizer(tmp_path / "tokenizer.json")
    parsed = load_tokenizer(TokenizerConfig(str(tmp_path / "tokenizer.json"), special="parse"))
    shown = lambda ids: " ".join(map(inner.id_to_token, ids))
    assert shown(text.encode([b"hi<s>"])[0]) == DOCUMENTS[kind]
    assert shown(text.encode_prompt("hi<s>")) == DOCUMENTS[kind].removesuffix(" </s>").removesuffix(" [SEP]")
    for rendered, tokens in {"<s>hi</s>": "<s> h i </s>", "hi<|end|>": "h i <|end|>", "<s>": "<s>"}.items():
        assert shown(parsed.encode([rendered.encode()])[0]) == f"{tokens.removesuffix(' </s>')} </s>"
        assert shown(parsed.encode_prompt(rendered)) == tokens
    conversation = ChatTemplate(CHAT).render([{"role": "user", "content": "hi"}]).text
    for tokenizer in (text, parsed):
        assert shown(tokenizer.encode_rendered(conversation)[0]) == "<s> <|user|> h i <|end|>"
    for tokenizer, prompt in ((text, "a <|end|>"), (parsed, "<s>a <|end|>"), (parsed, "a</s>")):
        begin = tokenizer.encode_prompt(prompt)
        assert begin == tokenizer.encode([prompt.encode()])[0][: len(begin)].tolist()


def test_eos_is_the_configured_the_files_or_a_usual_name(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path)
    ids = Tokenizer.from_file(str(file)).get_vocab()
    assert load_tokenizer(file).eos == ids[EOS]
    for token in (BEGIN, {"content": BEGIN, "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(file).eos == ids[BEGIN]
    assert load_tokenizer(TokenizerConfig(str(file), eos=EOS)).eos == ids[EOS]


def test_errors_name_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(config: TokenizerConfig | Path, kind: type[Exception] = DataError, *, name: str) -> None:
        with raises(kind, name):
            load_tokenizer(config)

    none = tmp_path / "none.json"
    error(none, name="none.json")
    error(file.parent, name="tokenizer")
    for content in (b"", b"{}", b"[1]", b"\xff", b'{"version": "1.0", "model": null}'):
        none.write_bytes(content)
        error(none, name="none.json")
    error(TokenizerConfig(str(file), eos="<|endoftxt|>"), name="tokenizer.json")
    plain = Tokenizer.from_file(str(file)).to_str().replace("endoftext", "finis")
    none.write_text(plain)
    error(none, name="none.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    error(file, MissingExtraError, name="tokenizer.json")


@pytest.mark.parametrize(("largest", "fits"), [(2**31 - 2, True), (2**31 - 1, False), (2**32 - 1, False)])
def test_ids_fit_int32(largest: int, fits: bool, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "b": largest}, "unk_token": "a"}
    file.write_text(json.dumps({"version": "1.0", "model": model}))  # the package takes minutes to write it
    if fits:
        assert load_tokenizer(file).vocab == 2**31 - 1
        return
    with raises(DataError, "tokenizer.json", "'b'"):
        load_tokenizer(file)
