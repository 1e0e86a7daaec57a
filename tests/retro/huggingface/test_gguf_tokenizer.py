"""The tokenizer of a GGUF file: the rule that the file names, its BOS and EOS, its tokens and no others."""

import io
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from indexing.store.errors import InputError
from indexing.tokenization.installation import open_huggingface
from indexing.tokenization.tokenizer import Tokenizer
from retro.huggingface.gguf_tokenizer import write_tokenizer

tokenizers = pytest.importorskip("tokenizers")
regex = pytest.importorskip("regex")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "rule:\n\n1.", "In 2024, 12345678 people", "HELLO'S don'T we'Ve", "x==y&&z \t\n\n  a", "你好12世界34。½ ١٢", " <|im_end|> a",
    "word\nword2\n\n  word3\r\n", "Zürich, naïve aX XaX", "", "  ", "a/b//\n/c...\n",
]  # fmt: skip
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "llama-bpe": [WORDS % r"\p{N}{1,3}"],
    "qwen2": [WORDS % r"\p{N}"],
    "tekken": [TEKKEN],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}


@pytest.fixture(scope="module")
def learned() -> tuple[list[str], list[str]]:
    """Tokens and merges that join digits, line ends, punctuation and words, so that every rule changes ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=CONTROL, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )  # fmt: skip
    pieces = (
        piece
        for text in TEXTS
        for end in range(2, 1 + len(text))
        for piece in (text[:end], text[-end:], text[end - 2 : end])
    )
    tokenizer.train_from_iterator(pieces, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return tokens, [" ".join(pair) for pair in content["merges"]]


def header(tokens: list[str], merges: list[str], /, **changes: Any) -> dict[str, Any]:
    types = [3 if token in CONTROL else 1 for token in tokens]
    values = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": merges, "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def opened(folder: Path, fields: dict[str, Any]) -> Tokenizer:
    write_tokenizer(Path("a.gguf"), fields, folder)
    return open_huggingface(str(folder))


def split(parts: Iterable[str], rule: str) -> list[str]:
    """The matches of a rule in each part, and what is between them."""
    return [piece for part in parts for piece in regex.split(f"({rule})", part) if piece]


def merged(part: str, tokens: list[str], merges: list[str], *, ignore_merges: bool) -> list[int]:
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(part)[0][0]
    symbols = [letters] if ignore_merges and letters in tokens else [*letters]
    while pairs := [pair for pair in pairwise(symbols) if " ".join(pair) in merges]:
        left, right = min(pairs, key=lambda pair: merges.index(" ".join(pair)))
        joined: list[str] = []
        for symbol in symbols:
            if joined[-1:] == [left] and symbol == right:
                joined[-1] += symbol
            else:
                joined.append(symbol)
        symbols = joined
    return [tokens.index(symbol) for symbol in symbols]


@pytest.mark.parametrize("pre", RULES)
def test_ids_are_those_of_the_rule_that_the_file_names(tmp_path: Path, learned: Any, pre: str) -> None:
    tokenizer = opened(tmp_path, header(*learned, pre=pre))
    whole = pre in ("llama-bpe", "tekken")
    for text in TEXTS:
        parts = [text]
        for rule in RULES[pre]:
            parts = split(parts, rule)
        expected = [number for part in parts for number in merged(part, *learned, ignore_merges=whole)]
        assert tokenizer.encode(text).tolist() == expected, text
        assert tokenizer.decode(expected) == text


def test_a_word_that_is_a_token_ignores_merges_only_if_the_rule_says_so(tmp_path: Path, learned: Any) -> None:
    tokens, merges = [*learned[0], "qzjx"], learned[1]
    for pre, expected in (("llama-bpe", [len(tokens) - 1]), ("smollm", [tokens.index(letter) for letter in "qzjx"])):
        assert opened(tmp_path, header(tokens, merges, pre=pre)).encode("qzjx").tolist() == expected


def test_the_tokenizer_has_the_files_tokens_and_no_others(tmp_path: Path, learned: Any) -> None:
    tokens = [*learned[0][3:], "<think>", "<s>"]  # without <|endoftext|>
    types = [*[1] * (len(tokens) - 2), 4, 3]
    tokenizer = opened(tmp_path, header(tokens, learned[1], token_type=types, eos_token_id=len(tokens) - 1))
    assert tokenizer.num_model_tokens == len(tokens)
    assert tokenizer.control_tokens == {"<s>": len(tokens) - 1}
    ids = tokenizer.encode("a<think>b<s>").tolist()
    assert ids[:3] == [tokens.index("a"), len(tokens) - 2, tokens.index("b")]  # a user-defined token is found in a text
    assert len(tokens) - 1 not in ids
    assert tokenizer.decode(ids) == "a<think>b<s>"


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("smollm", False, (0, 2)), ("smollm", None, (0, 2)), ("smollm", True, (1, 2)), ("llama-bpe", None, (1, 2)),
     ("llama-bpe", False, (0, 2))],
)  # fmt: skip
def test_bos_is_in_front_of_a_document_only_if_the_file_adds_it(
    tmp_path: Path, learned: Any, pre: str, flag: bool | None, expected: tuple[int, int]
) -> None:
    fields = header(*learned, pre=pre, add_bos_token=flag, bos_token_id=1, eos_token_id=2)
    tokenizer = opened(tmp_path, fields)
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids
    assert ids[:-1] == ([1] if expected[0] == 1 else [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'; accepted: deepseek-coder, gpt-2, llama-bpe"),
        ({"pre": None}, "tokenizer.ggml.pre is missing; accepted"),
        ({"pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; accepted"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; accepted: llama, gpt2"),
        ({"bos_token_id": 2**32 - 1}, "tokenizer.ggml.bos_token_id is 4294967295; accepted: an id below"),
        ({"eos_token_id": [0]}, r"tokenizer.ggml.eos_token_id is \[0\]; accepted"),
        ({"add_bos_token": 2}, "tokenizer.ggml.add_bos_token is 2; accepted: true, false"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"tokens": [["a"]]}, "tokenizer.ggml.tokens must be an array of type str"),
        ({"tokens": []}, "has no tokenizer"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 values for"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab'"),
        ({"merges": ["a 你"]}, "tokenizer.ggml.merges has 'a 你'"),
        ({"merges": None}, "tokenizer.ggml.merges must be an array"),
        ({"model": "llama"}, "tokenizer.ggml.unknown_token_id is missing"),
    ],
)
def test_a_header_that_is_not_supported_is_refused_by_key(
    tmp_path: Path, learned: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        write_tokenizer(tmp_path / "a.gguf", header(*learned, **changes), tmp_path)
    assert str(tmp_path / "a.gguf") in str(caught.value)
    assert not [*tmp_path.iterdir()]


# --- SentencePiece


@pytest.fixture(scope="module", params=[True, False], ids=["blank in front", "no blank"])
def pieces(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    """A SentencePiece model that adds a blank in front of a text or not, and the header that llama.cpp writes for it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n") if line] * 4),
        model_writer=model, model_type="bpe", vocab_size=360, hard_vocab_limit=False, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=request.param, minloglevel=2,
    )  # fmt: skip
    opened = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(opened.get_piece_size())
    kinds = [
        2 if opened.is_unknown(n) else 3 if opened.is_control(n) else 6 if opened.is_byte(n) else 1 for n in numbers
    ]
    values = {"model": "llama", "pre": "default", "token_type": kinds, "add_space_prefix": request.param}
    values |= {"tokens": [opened.id_to_piece(n) for n in numbers], "scores": [opened.get_score(n) for n in numbers]}
    values |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return opened, {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_ids_of_sentencepiece_are_those_of_its_library(tmp_path: Path, pieces: Any) -> None:
    model, fields = pieces
    tokenizer = opened(tmp_path, fields)
    for text in [*TEXTS, " a", "   a b ", "<s> x </s>", "<0x0A>", "\ta"]:
        assert tokenizer.encode(text).tolist() == model.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)  # SentencePiece files add BOS unless they say otherwise


def test_scores_that_give_no_order_of_merges_are_refused(tmp_path: Path, pieces: Any) -> None:
    fields = pieces[1] | {"tokenizer.ggml.scores": [-1000.0] * len(pieces[1]["tokenizer.ggml.tokens"])}
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.scores are all equal"):
        write_tokenizer(Path("a.gguf"), fields, tmp_path)
