"""Train a SentencePiece tokenizer on a sample of texts.

    texts ─► sample of passages ─► rare characters become line ends ─► trainer ─► model

It is lossless: it does not normalize, has a token for every byte, and has tokens for runs of blanks, tabs and line
ends.
"""

import io
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from indexing.progress import status
from indexing.store.errors import InputError
from indexing.store.files import write_bytes
from indexing.tokenization.backends import META_SYMBOL, SentencePiece
from indexing.tokenization.metadata import MODEL, write_metadata
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.texts import as_texts

# SentencePiece learns no piece with tabs and no piece with several line ends, so runs of them are declared.
WHITESPACE_PIECES = [*("\n" * n for n in range(1, 5)), *("\t" * n for n in range(1, 5)), "\r\n", "\r\n\r\n"]
_FIXED_PIECES = 4 + 256 + len(WHITESPACE_PIECES)  # special tokens, bytes, whitespace
_CHARACTER_COVERAGE = 0.9995
_TRAINING_PIECE = 1024  # characters per sampled piece: at most about 4 KB in UTF-8
# The last bits of the unigram trainer's sums depend on the number of threads, so the number is fixed.
_TRAINING_THREADS = 4

_RESERVED = "\u2585"  # ▅: the trainer drops every text that contains it


def train_sentencepiece(texts: Iterable[str], settings: TokenizerSettings, folder: Path) -> None:
    """Train a model on a sample of `texts`, which are read once, and write it to `folder`.

    The same texts and settings give the same bytes on any number of cores.

    Raises:
        InputError: there is no text to train on.
    """
    assert settings.is_trained
    passages = TextSample(settings.sample_bytes, settings.seed)
    for text in as_texts(texts):
        passages.add(text)
    if not (sample := passages.pieces()):
        raise InputError(
            "The corpus has no text to train a tokenizer on. Check the problems reported for corpus.paths."
        )
    counts = count_characters(sample)
    foreign = line_ends_for(counts, set(frequent_characters(counts, (settings.vocab_size - _FIXED_PIECES) // 2)))
    status("training on %s pieces of text", f"{len(sample):,}")
    model = run_trainer(
        [piece.translate(foreign) for piece in sample],
        model_type=settings.kind,
        vocab_size=settings.vocab_size,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        user_defined_symbols=WHITESPACE_PIECES,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / MODEL, model)
    trained = SentencePiece(folder / MODEL)
    write_metadata(folder, settings.kind, trained, trained.special_ids())


def run_trainer(sentences: list[str], **options: Any) -> bytes:
    """Train a SentencePiece model on sentences in which `line_ends_for` has replaced rare characters by line ends.

    The text is not normalized. `options` are additional options of the trainer.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # The last sentence gives the blank a token even if the corpus has none (Chinese). Otherwise SentencePiece would
        # write it as the three bytes of ▁. It also keeps the trainer from failing on an empty sample.
        sentence_iterator=iter([*sentences, " a"]),
        model_writer=model,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=2**20,
        num_threads=_TRAINING_THREADS,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


class TextSample:
    """A uniform sample of passages of up to 1024 characters from a stream of texts, `sample_bytes` in all.

    Every passage draws a random number, and the sample is the passages with the smallest ones. So one pass is enough,
    and memory holds only the sample.
    """

    def __init__(self, sample_bytes: int, seed: int) -> None:
        self._limit = sample_bytes
        self._generator = np.random.default_rng(seed)
        self._heap: list[tuple[float, int, str, int]] = []  # the largest random number first
        self._total = self._offered = 0

    def add(self, text: str) -> None:
        """Cut a text into passages and add them to the sample by chance."""
        import heapq

        pieces = [text[start : start + _TRAINING_PIECE] for start in range(0, len(text), _TRAINING_PIECE)]
        for piece, draw in zip(pieces, self._generator.random(len(pieces)).tolist(), strict=True):
            self._offered += 1
            if self._total >= self._limit and draw >= -self._heap[0][0]:
                continue
            size = len(piece.encode(errors="replace"))
            heapq.heappush(self._heap, (-draw, self._offered, piece, size))
            self._total += size
            while self._total - self._heap[0][3] >= self._limit:
                self._total -= heapq.heappop(self._heap)[3]

    def pieces(self) -> list[str]:
        """The passages sampled so far, in the order of the texts."""
        return [piece for _, _, piece, _ in sorted(self._heap, key=lambda item: item[1])]


def count_characters(pieces: Iterable[str]) -> Counter[str]:
    """Count the characters in texts that a tokenizer is trained on, without ▁, ▅ and blanks."""
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts.update(piece)
    for character in (META_SYMBOL, _RESERVED, " "):
        counts.pop(character, None)
    return counts


def frequent_characters(counts: Counter[str], limit: int, covered: Container[str] = ()) -> list[str]:
    """Choose the characters that get a token, the most frequent first.

    Together with the `covered` characters, which are not returned, they cover 99.95% of the text. They are at most
    `limit`.
    """
    target = _CHARACTER_COVERAGE * counts.total()
    total = sum(count for character, count in counts.items() if character in covered)
    frequent: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if character in covered:
            continue
        if total >= target or len(frequent) >= limit:
            break
        frequent.append(character)
        total += count
    return frequent


def line_ends_for(counts: Counter[str], alphabet: Container[str]) -> dict[int, str]:
    """A table for `str.translate`: counted characters that are not in the alphabet, and those no trainer accepts,
    become line ends.

    SentencePiece fails if the vocabulary cannot hold all characters of the requested coverage, and accepts no coverage
    below 98%. So the characters are chosen here. A line end separates texts and is not learned.
    """
    foreign = {ord(META_SYMBOL): "\n", ord(_RESERVED): "\n", **dict.fromkeys(range(0xD800, 0xE000), "\n")}
    return foreign | {ord(character): "\n" for character in counts if character not in alphabet}
