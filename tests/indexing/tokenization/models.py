"""Texts, and models that are trained on them: ours, and those of other projects."""

import json
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from hypothesis import strategies as st

from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.metadata import HUGGINGFACE_MODEL
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import train_sentencepiece

CODE = "def f(x):\n    if x:\n        return 1\n\n\n    return {\n\t\t'a': 12,\r\n\t}\n"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs, please.\n\n" * 5,
    CODE * 5,
    "中华人民共和国的法律，由全国人民代表大会制定。第一条 为了发展社会主义市场经济。\n" * 5,
]
DIFFICULT = [
    "", " ", "\n", "  a   b ", "\ta\t\tb\t\t\t\t\t", "a\r\nb\rc\r\n\r\n\r\n", "\u2581", " \u2581\u2581 x\u2581",
    "\u2585",
    "\x00", "a\x00b", "\ufffd", "\ufeff", "<s>", "</s><pad><unk>", "<0x0A>", "<0xE2><0x96>", "\u2028\x85", "𠀀",
    "\U0001f642\U0001f469\u200d\U0001f467", "e\u0301é\u212b", "Ａ½ﬁ\u3000\u00a0", "\U0010ffff", " ⁇ ", "\n" * 9,
    " " * 40, CODE,
]  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def train(folder: Path, texts: list[str] = TEXTS, **options: object) -> Tokenizer:
    train_sentencepiece(texts, TokenizerSettings(**{"vocab_size": 700, **options}), folder)  # type: ignore[arg-type]
    return Tokenizer.open(folder, num_threads=2)


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == tokenizer.dtype
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum(dtype=np.int64)) == len(text.encode())
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


def foreign_model(path: Path, texts: list[str] = TEXTS, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as writer:
        arguments = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **options}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=writer, **arguments)
    return path


def byte_level(folder: Path, config: dict[str, object] | None = None) -> Path:
    """A byte-level BPE like GPT-2's, in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / HUGGINGFACE_MODEL))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def install_huggingface(source: Path, folder: Path) -> Tokenizer:
    install_tokenizer(TokenizerSettings(kind="huggingface", path=str(source)), folder)
    return Tokenizer.open(folder)
