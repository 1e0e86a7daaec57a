"""Text to token ids and back.

texts ────────► train_sentencepiece ─┐
a model file ─► install_tokenizer ───┴► model, meta.json, token_bytes.npy ─► Tokenizer.open ─► encode, decode
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from indexing.store.artifact import intact
from indexing.tokenization.backends import HuggingFace, SentencePiece, TokenizerBackend
from indexing.tokenization.metadata import (
    END_OF_TEXT,
    HUGGINGFACE_MODEL,
    MODEL,
    TokenizerMeta,
    read_meta,
    read_token_bytes,
)
from indexing.tokenization.pieces import pieces
from indexing.tokenization.texts import as_texts

PIECE = 2**19  # characters of a piece of a long text
_LONG = 2 * PIECE  # longer texts are tokenized in pieces
_PIECES_AT_A_TIME = 4  # on several threads


class Tokenizer:
    """Encodes and decodes; opened from a folder that `train_sentencepiece` or `install_tokenizer` filled.

    Attributes:
        meta: its properties; `vocab_size`, `pad_id`, `bos_id`, `eos_id` and `dtype` are also attributes here.
        num_model_tokens: ids of the model itself; `vocab_size` also counts special tokens that were added after them.
        token_bytes: [vocab_size] uint16, UTF-8 bytes that each token adds to the text, 0 for special tokens. For a
            lossless tokenizer `token_bytes[encode(text)].sum()` is the size of the text. For others it is near that
            size plus `meta.added_bytes`.
        control_tokens: text and id of the model's tokens that no text encodes to, such as `<|im_end|>`.
    """

    def __init__(self, meta: TokenizerMeta, token_bytes: np.ndarray, model: TokenizerBackend, num_threads: int) -> None:
        self.meta = meta
        self.token_bytes = token_bytes
        self.vocab_size, self.dtype = meta.vocab_size, meta.dtype
        self.pad_id, self.bos_id, self.eos_id = meta.pad_id, meta.bos_id, meta.eos_id
        self.num_model_tokens = model.num_tokens()
        self.control_tokens = model.control_tokens()
        self._special = {meta.pad_id, meta.bos_id, meta.eos_id}
        self._model = model
        self._num_threads = num_threads

    @property
    def has_bos(self) -> bool:
        """False if a document begins with the token that ends the previous one."""
        return self.bos_id not in (self.eos_id, self.control_tokens.get(END_OF_TEXT))

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of the model's tokens by their names, as the model writes them."""
        return self._model.vocabulary()

    @classmethod
    def open(cls, folder: Path, num_threads: int = -1) -> "Tokenizer":
        """Open the tokenizer in `folder`; `num_threads` is for encode_batch, -1 = one per core.

        Hugging Face tokenizers take their number of threads from the environment instead: RAYON_NUM_THREADS, and for tiktoken
        OMP_NUM_THREADS.

        Raises:
            InputError: there is none, or the package that reads it is not installed.
        """
        meta = read_meta(folder)
        is_huggingface = meta.kind == "huggingface"
        path = intact(folder / (HUGGINGFACE_MODEL if is_huggingface else MODEL))
        model = HuggingFace(path) if is_huggingface else SentencePiece(path)
        return cls(meta, read_token_bytes(folder), model, num_threads)

    def encode(self, text: str) -> np.ndarray:
        """Token ids [tokens] of `dtype`, without begin and end of document. Lone surrogates count as U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: str | Iterable[str]) -> list[np.ndarray]:
        """Token ids of each text, as `encode`, on several threads. A string is one text."""
        texts = list(as_texts(texts))
        if any(len(text) > _LONG for text in texts):
            return [self._encode_long(text) if len(text) > _LONG else self._encode([text])[0] for text in texts]
        return self._encode(texts)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._model.encode_batch([_without_surrogates(text) for text in texts], self._num_threads)
        return [np.asarray(ids, dtype=self.dtype) for ids in encoded]

    def _encode_long(self, text: str) -> np.ndarray:
        return np.concatenate([*self.encode_blocks(text[i : i + PIECE] for i in range(0, len(text), PIECE))])

    def encode_blocks(self, blocks: str | Iterable[str]) -> Iterator[np.ndarray]:
        """Token ids of one long text that is given in blocks, in parts: together those of `encode`, in memory for a few
        pieces.

        With a SentencePiece model of the kind unigram they can differ from tokens of the whole text, which
        SentencePiece finds by sums in float32 that grow with the text.
        """
        cut = pieces(
            map(_without_surrogates, as_texts(blocks)),
            lambda texts: [list(ids) for ids in self._model.encode_batch(texts, 1)],
            PIECE,
        )
        while group := list(itertools.islice(cut, _PIECES_AT_A_TIME)):
            yield from self._encode(group)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids (an array or a list), without special tokens; incomplete characters become U+FFFD."""
        return self._model.decode_batch([[token for token in map(int, ids) if token not in self._special]], 1)[0]

    def decode_batch(self, ids: Sequence[np.ndarray]) -> list[str]:
        """The text of each row of token ids, as `decode`, on several threads."""
        special = self._special
        rows = [tokens if special.isdisjoint(tokens := row.tolist()) else _without(tokens, special) for row in ids]
        return self._model.decode_batch(rows, self._num_threads)


def _without(tokens: list[int], special: set[int]) -> list[int]:
    return [token for token in tokens if token not in special]


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text
