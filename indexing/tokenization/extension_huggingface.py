"""New pieces for a BPE of `tokenizer.json`: merges learned on top of the base's encoding of the corpus.

    text ── base ──► ids ── one character per id ──► "words" ── BpeTrainer ──► merges of ids ──► merges of pieces

A merge names the two tokens it joins and applies after all earlier merges. New merges come last. So the text is first
encoded exactly as the base does, and then some adjacent tokens are joined: no old token begins or ends elsewhere. Added
tokens ("added_tokens") would not do. They are searched for in the text before anything else, and take letters from the
words around them, so English would be encoded differently wherever one occurs.

Vocabularies that spell rare characters in bytes (Llama's) cannot join byte tokens, so frequent characters are added
first.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.errors import InputError
from indexing.store.files import checksum, write_bytes, write_json
from indexing.tokenization.backends import META_SYMBOL, HuggingFace, read_object
from indexing.tokenization.byte_level import BYTES
from indexing.tokenization.installation import special_settings
from indexing.tokenization.metadata import HUGGINGFACE_MODEL
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import count_characters, frequent_characters

_CONFIG = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_FIRST_CHARACTER = 0x10000  # character of id 0: above it are a million characters and no surrogates
_LONGEST = 48  # maximum of base tokens in a piece: sixteen characters of three bytes
_ASCII_ALPHABET = frozenset(character for character, byte in BYTES.items() if byte < 128)
# Words of a vocabulary with ▁ for a blank, split as SentencePiece does: at blanks, digits, and between scripts.
_EAST_ASIAN = r"\p{Han}\p{Hiragana}\p{Katakana}"
_WORD = (
    rf"▁?[{_EAST_ASIAN}]+|▁?[[\p{{L}}\p{{M}}]&&[^{_EAST_ASIAN}]]+|\p{{N}}|▁?[^\p{{L}}\p{{M}}\p{{N}}{META_SYMBOL}]+|▁+"
)


@dataclass(frozen=True)
class MergedPiece:
    """A piece that the base lacks, in the alphabet of its vocabulary.

    Attributes:
        piece: its text in this alphabet.
        merges: (rank among new merges, left, right) that make it; empty for a character.
    """

    piece: str
    merges: tuple[tuple[int, str, str], ...] = ()


class HuggingFaceBase:
    """A tokenizer.json to extend.

    Args:
        file: tokenizer.json.
        tokenizer: the same tokenizer, installed.

    Raises:
        InputError: the model's merges cannot be continued.
    """

    kind = "huggingface"

    def __init__(self, file: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.checksum = checksum(file)
        self._content = read_object(file)
        self._folder = file.parent
        model = self._content["model"]
        if "merges" not in model:
            raise InputError(
                f"{file} has a model of type {model.get('type')!r}; only BPE (GPT-2, GPT-NeoX, Llama, Mistral, Qwen) can be "
                "extended. If it was made from a SentencePiece model, extend that model."
            )
        for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(option):
                raise InputError(f"{file} has model.{option} = {model[option]!r}; a BPE without it can be extended.")
        self._added = {token["content"]: token["id"] for token in self._content.get("added_tokens", ())}
        decoder = self._content.get("decoder") or {}
        self._is_byte_level = "ByteLevel" in {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}

    # --- learning

    def learn(self, sample: Sequence[str], num_pieces: int, *, ascii: bool) -> list[MergedPiece]:
        """Learn pieces that the base lacks, the most useful first: `num_pieces` of them, and a quarter more in reserve.

        Without `ascii`, no piece has an ASCII character or a blank.
        """
        characters = [] if self._is_byte_level else self._characters(sample, num_pieces // 2)
        new = [MergedPiece(character) for character in characters]
        learner = _opened(self._extended(new, []))
        if _splits_no_words(self._content):
            self._cut_words(learner)
        names = {token: piece for piece, token in learner.get_vocab(with_added_tokens=True).items()}
        fixed = np.zeros(max(names) + 1, dtype=bool)
        for token, piece in names.items():
            fixed[token] = self._is_fixed(piece) or not (ascii or self._is_new(piece))
        words = list(_words(learner, sample, fixed))
        return new + _merged(words, names, num_pieces + num_pieces // 4 - len(new))

    def _characters(self, sample: Sequence[str], limit: int) -> list[str]:
        """Frequent characters without a token. ASCII characters are not added: line ends occur in texts of every
        language."""
        normalizer = _opened(self._content).normalizer
        counts = count_characters(sample if normalizer is None else map(normalizer.normalize_str, sample))
        eligible = Counter({key: count for key, count in counts.items() if not key.isascii()})
        return frequent_characters(eligible, limit, self._content["model"]["vocab"])

    def _cut_words(self, learner: Any) -> None:
        from tokenizers import Regex, pre_tokenizers

        split = pre_tokenizers.Split(Regex(_WORD), "isolated")
        old = learner.pre_tokenizer
        learner.pre_tokenizer = split if old is None else pre_tokenizers.Sequence([old, split])

    def _is_fixed(self, piece: str) -> bool:
        """True if a token cannot be part of a piece: bytes that are decoded one by one, and special tokens."""
        is_byte = not self._is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", piece)
        return bool(is_byte) or piece in self._added or piece == self._content["model"].get("unk_token")

    def _is_new(self, piece: str) -> bool:
        """True if a piece has no ASCII character and no blank."""
        ascii = _ASCII_ALPHABET if self._is_byte_level else {*map(chr, range(128)), META_SYMBOL}
        return ascii.isdisjoint(piece)

    # --- writing

    def write(self, chosen: Sequence[MergedPiece], folder: Path) -> Path:
        """Write the base with these pieces to `folder`; returns `folder`, which `tokenizer.path` names."""
        special, config = self._special_tokens()
        content = self._extended(chosen, special)
        write_bytes(folder / HUGGINGFACE_MODEL, json.dumps(content, indent=2, ensure_ascii=False).encode())
        write_json(folder / _CONFIG, config)
        if (self._folder / _CHAT_TEMPLATE).is_file():
            write_bytes(folder / _CHAT_TEMPLATE, (self._folder / _CHAT_TEMPLATE).read_bytes())
        return folder

    def _extended(self, chosen: Sequence[MergedPiece], special: list[dict[str, Any]]) -> dict[str, Any]:
        """The content of tokenizer.json with new special tokens and pieces.

        Added tokens go into the model's vocabulary too. Otherwise the library counts their ids from its end, which
        moves.
        """
        model = self._content["model"]
        vocabulary = {**model["vocab"], **self._added, **{token["content"]: token["id"] for token in special}}
        first = self.tokenizer.vocab_size
        vocabulary |= {item.piece: first + rank for rank, item in enumerate(chosen)}
        ways = sorted(way for item in chosen for way in item.merges)
        pairs = [(left, right) for _, left, right in ways if left in vocabulary and right in vocabulary]
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)  # format of older tokenizers versions
        merges = model["merges"] + [" ".join(pair) if as_text else list(pair) for pair in pairs]
        return {
            **self._content,
            "added_tokens": [*self._content.get("added_tokens", ()), *special],
            "model": {**model, "vocab": vocabulary, "merges": merges},
        }

    def _special_tokens(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Tokens for the ids that installing gave to special tokens, and the configuration with all roles."""
        tokenizer = self.tokenizer
        names = {token: piece for piece, token in (self._content["model"]["vocab"] | self._added).items()}
        config = special_settings(self._folder)
        has = {role for role in ("bos", "eos", "pad") if config.get(f"{role}_token")}
        special = []
        for role in ("bos", "eos", "pad"):
            token = getattr(tokenizer, f"{role}_id")
            if token not in names:
                piece = f"<|{role}|>"
                while piece in names.values():
                    piece = f"<{piece}>"
                names[token] = piece
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                special.append({"id": token, "content": piece, **flags, "special": True})
            # If one token serves as begin and end, only one role names it.
            if token >= tokenizer.num_model_tokens or not has & ({"pad"} if role == "pad" else {"bos", "eos"}):
                config[f"{role}_token"] = names[token]
        if "added_tokens_decoder" in config:
            entries = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in special}
            config["added_tokens_decoder"] = {**config["added_tokens_decoder"], **entries}
        return special, {"tokenizer_class": "PreTrainedTokenizerFast", **config}

    def model(self, file: Path) -> HuggingFace:
        """Open the tokenizer that `write` wrote."""
        return HuggingFace(file / HUGGINGFACE_MODEL)

    def unreachable(self, chosen: Sequence[MergedPiece], file: Path) -> set[str]:
        """The pieces of a written tokenizer that merges do not make from their own text."""
        content = read_object(file / HUGGINGFACE_MODEL)
        content["model"]["ignore_merges"] = (
            False  # Llama 3 looks up whole words first; a piece must also work inside words
        )
        model = _opened(content).model
        return {item.piece for item in chosen if [token.value for token in model.tokenize(item.piece)] != [item.piece]}

    def cuts(self, chosen: Sequence[MergedPiece]) -> list[list[int]]:
        """The base's ids for each piece."""
        return [[token.id for token in self._base_model.tokenize(item.piece)] for item in chosen]

    @cached_property
    def _base_model(self) -> Any:
        return _opened(self._content).model


def _opened(content: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Library

    opened = Library.from_str(json.dumps(content, ensure_ascii=False))
    opened.encode_special_tokens = True
    opened.no_truncation()
    opened.no_padding()
    return opened


def _words(learner: Any, sample: Sequence[str], fixed: np.ndarray) -> Iterator[str]:
    """Each text of the sample with one character per token, and a blank between words and for tokens that cannot be
    merged.

    `fixed` bool [ids] marks the tokens that cannot be merged.
    """
    for start in range(0, len(sample), 1024):
        for encoding in learner.encode_batch(list(sample[start : start + 1024]), add_special_tokens=False):
            ids = np.array(encoding.ids, dtype=np.uint32)
            words = np.array([-1 if word is None else word for word in encoding.word_ids])
            codes = np.where(fixed[ids], ord(" "), ids + _FIRST_CHARACTER)
            codes = np.insert(codes, np.flatnonzero(np.diff(words)) + 1, ord(" "))
            yield codes.astype("<u4").tobytes().decode("utf-32-le")


def _merged(words: Sequence[str], names: Mapping[int, str], num_pieces: int) -> list[MergedPiece]:
    """Learn up to `num_pieces` pieces by merging tokens in texts of `_words`; none is among `names`, the pieces by
    id."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    alphabet = len(set().union(*map(set, words)) - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=alphabet + num_pieces, min_frequency=2, max_token_length=_LONGEST, show_progress=False
    )
    trained.train_from_iterator(words, trainer)
    merges: dict[str, list[tuple[int, str, str]]] = {}
    for rank, pair in enumerate(json.loads(trained.to_str())["model"]["merges"]):
        left, right = ("".join(names[ord(token) - _FIRST_CHARACTER] for token in part) for part in pair)
        merges.setdefault(left + right, []).append((rank, left, right))
    known = set(names.values())
    return [MergedPiece(piece, tuple(ways)) for piece, ways in merges.items() if piece not in known]


def _splits_no_words(content: dict[str, Any]) -> bool:
    """True if merges receive whole texts, or words with everything up to the next blank."""
    step = content.get("pre_tokenizer")
    return step is None or step.get("type") == "Metaspace"
