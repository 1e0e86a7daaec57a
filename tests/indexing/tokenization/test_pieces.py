"""The tokens of a long text that is read in pieces are exactly those of the whole text, whatever the tokenizer does at blanks."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from indexing.tokenization.backends import HuggingFace, SentencePiece, TokenizerBackend
from indexing.tokenization.pieces import pieces
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import train_sentencepiece

PARTS = [
    "the ", "The quick brown fox ", "jumps over. ", "of the ", "\n", "\n\n", "    return x\n", "def f(x):\n", "\t", "  ",
    "a", "b ", " .", "x=1;", "12345 ", "don't ", "e\u0301t\u00e9 ", "Ａ½ﬁ ", "\u3000", "\u00a0", "中文的 ", "，", "检索模型。\n",
    "\u2581", " \u2581 ", "🙂👩\u200d👧 ", "<tool> ", "end. \n", "\r\n", "- ", "...", " " * 12, "\n" * 9, "aaaaaaaa", "(", ")",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PARTS), min_size=40, max_size=160).map("".join)
CORPUS = ["".join(parts) for parts in itertools.permutations(PARTS[:16], 2)] + [
    "The quick brown fox jumps over the lazy dog, and the index of the chunk is in the store of the text.\n" * 3,
    "def f(x):\n    if x == 1:\n        return 12\n\n\n检索模型的训练数据，向量分片。\n" * 3,
]
LLAMA3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sentence_piece(folder: Path, **options: Any) -> SentencePiece:
    path, given = folder / "m.model", {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True} | options
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, hard_vocab_limit=False, minloglevel=2, **given
        )
    return SentencePiece(path)


def hugging_face(
    folder: Path, model: Any, trainer: Any, normalizer: Any = None, pre: Any = None, added: tuple[Any, ...] = ()
) -> HuggingFace:
    made = tokenizers.Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(list(added))
    made.save(str(folder / "tokenizer.json"))
    return HuggingFace(folder / "tokenizer.json")


def bpe(**options: Any) -> Any:
    return trainers.BpeTrainer(vocab_size=500, show_progress=False, **options)


ALPHABET = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
IDENTITY = {"normalization_rule_name": "identity"}
PRE, NORM = pre_tokenizers, normalizers


def without_words(made: HuggingFace, folder: Path) -> HuggingFace:
    """The same tokens, but the whole text is one word that begins with a blank."""
    content = json.loads((folder / "tokenizer.json").read_text())
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    content |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": steps}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return HuggingFace(folder / "tokenizer.json")


def _trained(folder: Path, kind: str) -> TokenizerBackend:
    train_sentencepiece(CORPUS, TokenizerSettings(kind=kind, vocab_size=420), folder)  # type: ignore[arg-type]
    return SentencePiece(folder / "sentencepiece.model")


MAKERS: dict[str, Callable[[Path], TokenizerBackend]] = {
    "trained bpe": lambda f: _trained(f, "bpe"),
    "trained unigram": lambda f: _trained(f, "unigram"),
    "Llama 2": lambda f: sentence_piece(f, **IDENTITY, remove_extra_whitespaces=False, add_dummy_prefix=True),
    "T5": lambda f: sentence_piece(f, model_type="unigram", normalization_rule_name="nmt_nfkc"),
    "blanks behind words": lambda f: sentence_piece(f, treat_whitespace_as_suffix=True),
    "tokens with blanks": lambda f: sentence_piece(f, split_by_whitespace=False, **IDENTITY),
    "GPT-2": lambda f: hugging_face(f, models.BPE(), bpe(**ALPHABET), pre=PRE.ByteLevel(add_prefix_space=False)),
    "GPT-2 with a blank": lambda f: hugging_face(f, models.BPE(), bpe(**ALPHABET), pre=PRE.ByteLevel()),
    "Llama 3": lambda f: hugging_face(
        f,
        models.BPE(),
        bpe(**ALPHABET),
        pre=PRE.Sequence(
            [PRE.Split(tokenizers.Regex(LLAMA3), "isolated"), PRE.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
    ),
    "Metaspace": lambda f: hugging_face(f, models.Unigram(), trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>"), pre=PRE.Metaspace()),
    "Metaspace, first": lambda f: hugging_face(f, models.BPE(unk_token="?"), bpe(special_tokens=["?"]), pre=PRE.Metaspace(prepend_scheme="first")),
    "Llama 2 as tokenizer.json": lambda f: without_words(
        hugging_face(f, models.BPE(unk_token="?", fuse_unk=True), bpe(special_tokens=["?"]), pre=PRE.Metaspace()), f
    ),
    "BERT": lambda f: hugging_face(
        f,
        models.WordPiece(unk_token="[UNK]"),  # type: ignore[call-arg]
        trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]"]),
        NORM.BertNormalizer(),
        PRE.BertPreTokenizer(),
    ),
    "whole text as one word": lambda f: hugging_face(f, models.BPE(unk_token="?"), bpe(special_tokens=["?"], max_token_length=24)),
    "added tokens with blanks": lambda f: hugging_face(
        f,
        models.BPE(),
        bpe(**ALPHABET),
        NORM.NFC(),
        PRE.ByteLevel(add_prefix_space=False),
        (
            tokenizers.AddedToken("<tool>", lstrip=True, rstrip=True),
            tokenizers.AddedToken("of the "),
            tokenizers.AddedToken("\n\n\n"),
        ),
    ),
}  # fmt: skip


UNIGRAM = ("trained unigram", "T5")


@pytest.fixture(scope="module", params=MAKERS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TokenizerBackend]:
    return request.param, MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def backend(named: tuple[str, TokenizerBackend]) -> TokenizerBackend:
    return named[1]


@settings(max_examples=60)
@given(text=TEXT, size=st.integers(1, 300), block=st.integers(1, 400))
def test_tokens_of_the_pieces_are_those_of_the_whole(
    named: tuple[str, TokenizerBackend], text: str, size: int, block: int
) -> None:
    name, backend = named
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    cut = list(pieces(blocks, lambda texts: backend.encode_batch(texts, 1), size))
    together = [token for row in backend.encode_batch(cut, 1) for token in row]
    whole = backend.encode_batch([text], 1)[0]
    if name in UNIGRAM and together != whole:
        # The score of tokens is a sum from the beginning of a text: rounding decides between nearly equal ones.
        assert isinstance(backend, SentencePiece)
        one, other = (sum(map(backend.processor.get_score, tokens)) for tokens in (together, whole))
        assert one == pytest.approx(other, rel=1e-5)
        assert backend.decode_batch([together], 1) == backend.decode_batch([whole], 1)
    else:
        assert together == whole


def test_every_tokenizer_cuts_ordinary_text_into_many_pieces(backend: TokenizerBackend) -> None:
    text = "".join(CORPUS[-2:]) * 20
    cut = list(pieces([text], lambda texts: backend.encode_batch(texts, 1), 200))
    assert len(cut) > len(text) / 800


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_long_texts_are_encoded_in_pieces_and_without_a_safe_place_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trained(tmp_path, kind)
    tokenizer = Tokenizer.open(tmp_path, 1)
    texts = ["".join(CORPUS[-2:]) * 9, "short", "", "abc" * 700, "x \ud800 y " * 200]
    whole = [row.tolist() for row in tokenizer.encode_batch(texts)]
    monkeypatch.setattr("indexing.tokenization.tokenizer.PIECE", 100)
    monkeypatch.setattr("indexing.tokenization.tokenizer._LONG", 1000)
    called = list[int]()
    encode = tokenizer._model.encode_batch
    monkeypatch.setattr(
        tokenizer._model, "encode_batch", lambda texts, n: (called.extend(map(len, texts)), encode(texts, n))[1]
    )
    assert [row.tolist() for row in tokenizer.encode_batch(texts)] == whole
    assert max(called) == len(texts[3])
    assert sorted(called)[-2] < 1000
    assert [row.dtype for row in tokenizer.encode_batch(texts)] == [tokenizer.dtype] * len(texts)
