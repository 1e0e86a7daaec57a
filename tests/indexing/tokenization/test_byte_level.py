"""tiktoken gives the ids of the package `tokenizers`, or leaves a text to it."""

import json
import random
import unicodedata
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings

from indexing.tokenization import backends
from indexing.tokenization.byte_level import ByteLevelBPE, byte_level
from tests.indexing.tokenization import models

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECES = [
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    "It's",
    "'S",
    "12",
    "½",
    "é",
    "e\u0301",
    "中文",
    "。",
    "x_y",
    "!!",
    "🙂",
    "ſ",
    "\u3000",
    "\u200b",
    "<tool>",
]


def split(pattern: str) -> Any:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def byte_characters(use_regex: bool) -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


SHAPES = {
    "GPT-2": [byte_characters(True)],
    "Llama 3": [split(LLAMA3), byte_characters(False)],
    "Qwen 2": [split(QWEN2), byte_characters(False)],
    "SmolLM2": [tokenizers.pre_tokenizers.Digits(individual_digits=True), byte_characters(True)],
    "SmolLM2 from GGUF": [split(r"\p{N}"), split(GPT2), byte_characters(False)],
}


def trained(parts: list[Any], nfc: bool = False, alphabet: bool = True) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    if nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    characters = tokenizers.pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], show_progress=False, initial_alphabet=characters
    )
    tokenizer.train_from_iterator([*models.TEXTS, *models.DIFFICULT] * 2, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.encode_special_tokens = True
    return tokenizer


def content(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tokenizer.to_str())
    return value


def fast(tokenizer: tokenizers.Tokenizer) -> ByteLevelBPE:
    made = byte_level(content(tokenizer), tokenizer)
    assert made is not None
    return made


def check_equal(tokenizer: tokenizers.Tokenizer, ours: ByteLevelBPE, texts: list[str]) -> int:
    """Compare the ids of all texts; returns the number of those that tiktoken encoded."""
    encoded = [ours.encode(text) for text in texts]
    theirs = tokenizer.encode_batch(texts, add_special_tokens=False)
    for text, ids, right in zip(texts, encoded, theirs, strict=True):
        assert ids is None or ids.tolist() == right.ids, text
    return sum(ids is not None for ids in encoded)


@pytest.mark.parametrize("name", SHAPES)
def test_ids_are_those_of_the_library_tokenizers(name):
    tokenizer = trained(SHAPES[name], nfc=name == "Qwen 2")
    ours, draw = fast(tokenizer), random.Random(0)
    texts = [*models.TEXTS, *models.DIFFICULT, *("".join(draw.choices(PIECES, k=12)) for _ in range(2000))]
    assert check_equal(tokenizer, ours, texts) > 200

    @given(models.ANY_TEXT)
    @settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        check_equal(tokenizer, ours, [text])

    check()


@pytest.mark.parametrize("name", ["Llama 3", "SmolLM2"])
def test_every_character_is_of_the_same_kind_in_both_libraries(name):
    tokenizer = trained(SHAPES[name])
    ours = fast(tokenizer)
    characters = (chr(code) for code in range(0x110000))
    known = [character for character in characters if unicodedata.category(character) not in ("Cn", "Co", "Cs")]
    lines = [
        " ".join(
            f"a{character}a{character} {character}'{character}1{character}" for character in known[start : start + 8]
        )
        for start in range(0, len(known), 8)
    ]
    assert check_equal(tokenizer, ours, lines) > 0.4 * len(lines)


@pytest.mark.parametrize(
    "text",
    ["a new letter: \U0001e900", "🙂", "a <tool> b", " " * 2_000_000 + "x"],
    ids=["letter", "emoji", "added", "blanks"],
)
def test_texts_that_the_libraries_may_read_differently_are_left_out(text):
    assert fast(trained(SHAPES["GPT-2"])).encode(text) is None


def test_texts_in_another_normal_form_are_left_out():
    ours = fast(trained(SHAPES["Qwen 2"], nfc=True))
    assert ours.encode("e\u0301") is None
    assert ours.encode("\u00e9") is not None


def test_characters_without_a_byte_in_the_vocabulary_are_left_out():
    tokenizer = trained(SHAPES["GPT-2"], alphabet=False)
    assert byte_level(content(tokenizer), tokenizer) is None  # bytes of whole scripts are missing
    tokenizer = trained(SHAPES["GPT-2"])
    without = content(tokenizer)
    del without["model"]["vocab"]["\u0104"]  # the byte 4
    ours = byte_level(without, tokenizers.Tokenizer.from_str(json.dumps(without)))
    assert ours is not None
    assert ours.encode("a\x04b") is None
    assert ours.encode("ab") is not None


def changed(**model: object) -> dict[str, Any]:
    value = content(trained(SHAPES["GPT-2"]))
    value["model"] |= model
    return value


def test_models_that_tiktoken_would_read_differently_are_refused():
    plain = changed()
    first, second = plain["model"]["merges"][-1]
    token = first + second
    other = [[token[:1], token[1:]]] if token[1:] in plain["model"]["vocab"] and token[:1] != first else []
    cases = [
        changed(unk_token="<|end|>"),
        changed(merges=[*plain["model"]["merges"], *other, [first, second]]),  # one token of two merges
        changed(vocab={**plain["model"]["vocab"], "a中": 5000, "中": 5001}, merges=[["a", "中"]]),  # not bytes
        plain | {"normalizer": {"type": "Lowercase"}},
        plain | {"pre_tokenizer": {"type": "Whitespace"}},
        plain
        | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ]
    for case in cases:
        assert byte_level(case, tokenizers.Tokenizer.from_str(json.dumps(case))) is None


def test_tokens_that_no_text_leads_to_are_not_made():
    """With merges ab, bc, and abc of a and bc, the bytes abc become ab and c: tiktoken alone would join them."""
    vocabulary = {character: number for number, character in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
    for token in ("ab", "bc", "abc"):
        vocabulary[token] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("a", "bc")]))
    tokenizer.pre_tokenizer = byte_characters(True)
    ours = fast(tokenizer)
    ids = ours.encode("abc bc")
    assert ids is not None
    assert ids.tolist() == tokenizer.encode("abc bc", add_special_tokens=False).ids
    assert vocabulary["abc"] not in ids


def test_a_datastore_tokenizer_uses_it_once_there_is_much_text(tmp_path, monkeypatch):
    opened = models.install_huggingface(models.byte_level(tmp_path / "hf"), tmp_path / "t")
    texts = [*models.TEXTS, *models.DIFFICULT]
    plain = [ids.tolist() for ids in opened.encode_batch(texts)]
    used = list[str]()
    monkeypatch.setattr(backends, "_MANY", 1)
    monkeypatch.setattr(ByteLevelBPE, "encode", _recording(ByteLevelBPE.encode, used))
    encoded = opened.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == plain
    assert {ids.dtype for ids in encoded} == {np.dtype(opened.dtype)}
    assert used == texts


def _recording(encode: Any, used: list[str]) -> Any:
    def recorded(self: ByteLevelBPE, text: str) -> np.ndarray | None:
        used.append(text)
        ids: np.ndarray | None = encode(self, text)
        return ids

    return recorded
