"""The two tokenizer libraries with one interface: SentencePiece models and Hugging Face's `tokenizer.json`."""

import base64
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from indexing.machine import allowed_threads, map_ahead
from indexing.store.errors import InputError
from indexing.store.files import parse_json
from indexing.tokenization.byte_level import BYTES, ByteLevelBPE, byte_level

META_SYMBOL = "\u2581"  # ▁: SentencePiece writes it for a blank and cannot distinguish the two

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token for one byte

_MANY = 2**19  # characters that a process encodes before it makes tiktoken's tables, which takes as long

Ids = list[int] | np.ndarray  # the tokens [t] of a text


class SentencePiece:
    """A SentencePiece model.

    It writes ▁ for a blank, so a ▁ in the text is decoded as a blank. If the model has a token for each byte and adds
    no blank before a text, ▁ is encoded as its three bytes instead, and decoded correctly.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.load(str(path))
        except (RuntimeError, OSError) as error:
            raise InputError(
                f"{path} is not a SentencePiece model, or it is damaged. Copy it again, or name another file."
            ) from error
        self.symbol_ids: list[int] = []
        byte_ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in META_SYMBOL.encode()]
        adds_blank = self.processor.id_to_piece(self.processor.encode("a")[0]).startswith(META_SYMBOL)
        if not adds_blank and all(map(self.processor.is_byte, byte_ids)):
            self.symbol_ids = byte_ids

    def encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        encoded: list[Ids] = self.processor.encode(texts, num_threads=num_threads)
        for index, text in enumerate(texts):
            if self.symbol_ids and META_SYMBOL in text:
                encoded[index] = list(self._around_symbols(text))
        return encoded

    def _around_symbols(self, text: str) -> Iterator[int]:
        for index, part in enumerate(text.split(META_SYMBOL)):
            yield from self.symbol_ids if index else ()
            yield from self.processor.encode(part)

    def decode_batch(self, ids: list[list[int]], num_threads: int) -> list[str]:
        size = self.num_tokens()
        rows = [row if max(row, default=0) < size else [token for token in row if token < size] for row in ids]
        return self.processor.decode(rows, num_threads=num_threads) if rows else []

    def num_tokens(self) -> int:
        return self.processor.get_piece_size()

    def vocabulary(self) -> dict[str, int]:
        return {self.processor.id_to_piece(token): token for token in range(self.num_tokens())}

    def token_bytes(self) -> list[int]:
        processor = self.processor
        sizes = []
        for token in range(self.num_tokens()):
            if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
                sizes.append(0)  # an unknown token can stand for any number of bytes; 0 is a lower bound
            elif processor.is_byte(token):
                sizes.append(1)
            else:
                sizes.append(len(processor.id_to_piece(token).replace(META_SYMBOL, " ").encode()))
        return sizes

    def control_tokens(self) -> dict[str, int]:
        ids = range(self.num_tokens())
        return {self.processor.id_to_piece(token): token for token in ids if self.processor.is_control(token)}

    def special_ids(self) -> dict[str, int | None]:
        ids = {"pad": self.processor.pad_id(), "bos": self.processor.bos_id(), "eos": self.processor.eos_id()}
        return {role: token if token >= 0 else None for role, token in ids.items()}


class HuggingFace:
    """A tokenizer.json, read by the `tokenizers` package. Special tokens in a text are encoded as ordinary text."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise InputError(
                f"{path} needs the package tokenizers, which is not installed: pip install 'retro[transformer]'"
            ) from error
        self.path, self.content = path, read_object(path)
        if "model" not in self.content:
            raise InputError(
                f"{path} is not a Hugging Face tokenizer: it has no 'model'. Found: {', '.join(self.content)}"
            )
        _check_content(path, self.content)
        with _library_errors(path):
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        if self.content["model"].get("dropout"):  # a text has one sequence of ids, in every shard and request
            self.tokenizer.model.dropout = None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        decoder = self.content.get("decoder") or {}
        self._decoders = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        self._special = set(self.control_tokens().values())
        self._characters = 0  # of all texts so far

    def encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        self._characters += sum(map(len, texts))
        if self._characters < _MANY or self._byte_level is None:
            return self._encode(texts)
        encode = self._byte_level.encode
        # For the text of one file, starting a thread would take as long.
        known = [encode(texts[0])] if len(texts) == 1 else list(map_ahead(encode, texts, allowed_threads()))
        others = iter(self._encode([text for text, ids in zip(texts, known, strict=True) if ids is None]))
        return [next(others) if ids is None else ids for ids in known]

    def _encode(self, texts: list[str]) -> list[Ids]:
        with _library_errors(self.path):
            # Without the places of tokens in the text, in 0.65 of the time.
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _byte_level(self) -> ByteLevelBPE | None:
        return byte_level(self.content, self.tokenizer)

    def decode_batch(self, ids: list[list[int]], num_threads: int) -> list[str]:
        texts: list[str] = self.tokenizer.decode_batch(ids, skip_special_tokens=True)
        if "ByteFallback" in self._decoders:
            texts = [self._decode(row) if "\ufffd" in text else text for row, text in zip(ids, texts, strict=True)]
        return texts

    def _decode(self, ids: list[int]) -> str:
        """Decode ids that include byte tokens. Only invalid bytes become U+FFFD.

        The decoder of `tokenizers` replaces all adjacent bytes if one of them is invalid or the last character is
        incomplete.
        """
        tokens = [self.tokenizer.id_to_token(token) for token in ids if token not in self._special]
        text: str = self.tokenizer.decoder.decode(
            list(_with_valid_bytes(token for token in tokens if token is not None))
        )
        return text

    def num_tokens(self) -> int:
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def first_id(self) -> int | None:
        """Return the id that the model's own tokenizer puts in front of a text; None if it puts none there."""
        with _library_errors(self.path):
            with_special, without = (self.tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
        return None if with_special[:1] == without[:1] else with_special[0]

    def control_tokens(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in self.content.get("added_tokens", ()) if token["special"]}

    def token_bytes(self) -> list[int]:
        """Exact for byte-level BPE and for ▁ with byte tokens; otherwise the bytes that a token decodes to on its
        own."""
        types = self._decoders
        added = {token["id"]: token for token in self.content.get("added_tokens", ())}
        vocabulary = self.vocabulary()
        sizes = [0] * self.num_tokens()
        for token, token_id in vocabulary.items():
            if token_id in added:
                size = 0 if added[token_id]["special"] else len(token.encode())
            elif "ByteLevel" in types and BYTES.keys() >= set(token):
                size = len(token)
            elif "ByteFallback" in types and _BYTE.fullmatch(token):
                size = 1
            elif types & {"ByteFallback", "Metaspace"}:
                size = len(token.replace(META_SYMBOL, " ").encode())
            else:
                size = len(self.tokenizer.decode([token_id], skip_special_tokens=False).encode())
            sizes[token_id] = size
        return sizes


def _with_valid_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """Replace invalid UTF-8 in adjacent byte tokens by U+FFFD."""
    for is_byte, group in groupby(tokens, key=lambda token: _BYTE.fullmatch(token) is not None):
        if not is_byte:
            yield from group
            continue
        for character in bytes(int(token[3:5], 16) for token in group).decode(errors="replace"):
            yield from [character] if character == "\ufffd" else (f"<0x{byte:02X}>" for byte in character.encode())


@contextlib.contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Report errors of the package `tokenizers` as InputError; it raises plain exceptions, and panics of Rust."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{path}: the package tokenizers cannot use this tokenizer ({reason}). Copy it again."
        ) from error


def _check_content(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse ids that need tables larger than the file, and sizes that the package `tokenizers` believes."""
    model, added = content["model"], content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocabulary, Mapping | list):
        raise InputError(f"{path}: model.vocab must be an object or an array. Copy the file again.")
    keys = {"id": int, "content": str, "special": bool}
    if not isinstance(added, list) or not all(
        isinstance(token, Mapping) and all(type(token.get(key)) is kind for key, kind in keys.items())
        for token in added
    ):
        raise InputError(
            f"{path}: added_tokens must be an array of objects with {', '.join(keys)}. Copy the file again."
        )
    largest = path.stat().st_size  # each token needs more than a byte
    pieces = vocabulary.items() if isinstance(vocabulary, Mapping) else ()
    for text, token_id in (*pieces, *((token["content"], token["id"]) for token in added)):
        if type(token_id) is not int or not 0 <= token_id < largest:
            raise InputError(
                f"{path}: the token {text[:100]!r} has the id {str(token_id)[:100]}; accepted: whole numbers from 0, below the size of the "
                f"file, {largest:,}. Copy the file again."
            )
    normalizer = content.get("normalizer") or {}
    for part in [normalizer, *(normalizer.get("normalizers") or ())] if isinstance(normalizer, Mapping) else []:
        if isinstance(part, Mapping) and part.get("type") == "Precompiled":
            _check_charsmap(path, part.get("precompiled_charsmap"))


def _check_charsmap(path: Path, stored: object) -> None:
    """Refuse a table of characters whose trie is larger than the table: little-endian size of the trie, trie, texts."""
    try:
        table = base64.b64decode(str(stored), validate=True)
    except ValueError:
        table = b""
    size = int.from_bytes(table[:4], "little")
    if len(table) < 8 or size % 4 or size > len(table) - 4:
        raise InputError(f"{path}: normalizer.precompiled_charsmap is damaged. Copy the file again.")


TokenizerBackend = SentencePiece | HuggingFace


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raises InputError if the file holds something else."""
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, it must be a JSON object.")
    return value
