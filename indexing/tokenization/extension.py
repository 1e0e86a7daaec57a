"""Vocabulary extension: learn pieces on a corpus (such as Chinese) and add them to a tokenizer that lacks them.

    base tokenizer ─ learn on a sample ─► candidates ─ drop pieces that no text uses or that change other texts ─► write

Old ids do not change. This includes the ids for padding, begin and end that installing the base added: they become
tokens of the extended tokenizer, and new pieces start after them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.errors import InputError
from indexing.store.remote import present
from indexing.tokenization.extension_huggingface import HuggingFaceBase
from indexing.tokenization.extension_sentencepiece import SentencePieceBase
from indexing.tokenization.installation import open_installed
from indexing.tokenization.metadata import HUGGINGFACE_MODEL, META, MODEL, SENTENCEPIECE_NAMES
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.texts import as_texts
from indexing.tokenization.tokenizer import Tokenizer

log = logging.getLogger("retro")


ExtensibleTokenizer = HuggingFaceBase | SentencePieceBase


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer.

    Attributes:
        path: value for `tokenizer.path`, with tokenizer.kind = `kind`.
        kind: `sentencepiece` or `huggingface`.
        tokenizer: the extended tokenizer, installed.
        old: the base, installed.
        pieces: the new pieces in the vocabulary's alphabet; their ids start at `old.vocab_size`.
        cuts: the old ids of each piece.
    """

    path: Path
    kind: str
    tokenizer: Tokenizer
    old: Tokenizer
    pieces: list[str]
    cuts: list[list[int]]


def open_base(path: Path) -> ExtensibleTokenizer:
    """Open a tokenizer to extend.

    Args:
        path: a SentencePiece model, a tokenizer.json, a folder with one of them, a datastore, or a datastore's
            tokenizer folder.

    Raises:
        InputError: `path` is none of these, or this type of tokenizer cannot be extended.
    """
    folder = next((folder for folder in (path, path / "tokenizer") if present(folder / META).is_file()), None)
    if folder is not None:
        tokenizer = Tokenizer.open(folder)
        file = present(folder / (HUGGINGFACE_MODEL if tokenizer.meta.kind == "huggingface" else MODEL))
    else:
        file = _file_of(path)
        tokenizer = _installed("huggingface" if file.suffix == ".json" else "sentencepiece", file)
    return HuggingFaceBase(file, tokenizer) if file.suffix == ".json" else SentencePieceBase(file, tokenizer)


def _file_of(path: Path) -> Path:
    files = [path / name for name in (HUGGINGFACE_MODEL, *SENTENCEPIECE_NAMES)] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    raise InputError(
        f"{path} is not a tokenizer. Name a SentencePiece model (.model), a {HUGGINGFACE_MODEL}, a folder with one of them, or "
        "a datastore."
    )


def _installed(kind: Any, path: Path) -> Tokenizer:
    """Install a tokenizer as a datastore does."""
    source = path.parent if path.name == HUGGINGFACE_MODEL else path  # the files next to it name the special tokens
    return open_installed(TokenizerSettings(kind=kind, path=str(source)))


def extend(
    base: ExtensibleTokenizer,
    sample: Sequence[str],
    kept: Sequence[str],
    num_pieces: int,
    folder: Path,
    *,
    ascii: bool = False,
) -> Extension:
    """Learn pieces and write the base with them to `folder`.

    Args:
        base: tokenizer to extend.
        sample: texts to learn from.
        kept: other texts, whose ids must not change: a piece that would occur in one of them is dropped.
        num_pieces: maximum of new pieces; a small corpus gives fewer.
        folder: an empty folder.
        ascii: also learn pieces with ASCII characters and blanks. Without them, every ASCII text keeps its ids.

    Raises:
        InputError: the sample has nothing that the base lacks, or the result is not as lossless as the base.
    """
    kept = as_texts(kept)
    candidates: list[Any] = [*base.learn(as_texts(sample), num_pieces, ascii=ascii)]
    while chosen := candidates[:num_pieces]:
        path = base.write(chosen, folder)
        unfit = base.unreachable(chosen, path) | _used(base, chosen, path, kept)
        if not unfit:
            break
        candidates = [item for item in candidates if item.piece not in unfit]
    if not chosen:
        raise InputError(
            "There is nothing new to add: the tokenizer already has every piece found in the corpus, or the missing pieces would "
            "change the texts of `keep`."
        )
    if len(chosen) < num_pieces:
        log.warning("the corpus gives %d new pieces, not %d", len(chosen), num_pieces)
    tokenizer = _installed(base.kind, path)
    _check(base.tokenizer, tokenizer, len(chosen))
    return Extension(path, base.kind, tokenizer, base.tokenizer, [item.piece for item in chosen], base.cuts(chosen))


def _used(base: ExtensibleTokenizer, chosen: Sequence[Any], path: Path, texts: Sequence[str]) -> set[str]:
    """The pieces that occur in the encoding of some texts."""
    first = base.tokenizer.vocab_size
    used = {token for ids in base.model(path).encode_batch(list(texts), -1) for token in ids if token >= first}
    return {chosen[token - first].piece for token in used}


def _check(old: Tokenizer, new: Tokenizer, num_pieces: int) -> None:
    """Raise InputError if an unusual base makes the extended tokenizer wrong."""
    same = (old.pad_id, old.bos_id, old.eos_id) == (new.pad_id, new.bos_id, new.eos_id)
    if not same or new.vocab_size != old.vocab_size + num_pieces:
        raise InputError(
            "The tokenizer cannot be extended: its special tokens would get other ids. Check whether one of them has an id above "
            "all pieces, without a piece."
        )
    if old.meta.lossless and not new.meta.lossless:
        raise InputError("The tokenizer cannot be extended: it would no longer decode every text correctly.")


@dataclass(frozen=True)
class Comparison:
    """Some texts, encoded before and after the extension.

    Attributes:
        num_bytes: UTF-8 bytes of the texts.
        old_tokens, new_tokens: tokens from the base and from the extended tokenizer.
        used: share of the new pieces that occur in them.
        texts: number of texts.
        unchanged: number of texts whose ids did not change.
    """

    num_bytes: int
    old_tokens: int
    new_tokens: int
    used: float
    texts: int
    unchanged: int


def compare(extension: Extension, texts: Sequence[str]) -> Comparison:
    """Encode texts with both tokenizers.

    Raises:
        InputError: the base decodes a text correctly, and the extended tokenizer does not.
    """
    texts = as_texts(texts)
    before, after = (tokenizer.encode_batch(texts) for tokenizer in (extension.old, extension.tokenizer))
    for text, old, new in zip(texts, before, after, strict=True):
        if extension.tokenizer.decode(new) != text and extension.old.decode(old) == text:
            raise InputError(f"The tokenizer cannot be extended: it would no longer decode {text[:60]!r} correctly.")
    new_ids = np.unique(np.concatenate([np.zeros(0, np.int64), *after]))
    return Comparison(
        num_bytes=sum(len(text.encode(errors="replace")) for text in texts),
        old_tokens=sum(map(len, before)),
        new_tokens=sum(map(len, after)),
        used=int((new_ids >= extension.old.vocab_size).sum()) / len(extension.pieces),
        texts=len(texts),
        unchanged=sum(map(np.array_equal, before, after)),
    )
