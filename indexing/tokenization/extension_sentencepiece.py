"""New pieces for a SentencePiece model, found by sentencepiece's own trainer with the options of the base.

BPE: the encoder joins the adjacent pieces whose union has the highest score. New pieces score below all old pieces. So
old pieces are made first, as before, and new merges continue from there. Unigram: scores are log-probabilities of the
corpus, clipped to the range of the base, because the ends of this range score unknown characters and declared pieces.

Model files are read and extended with the protobuf classes that sentencepiece ships. Concatenated Protocol Buffers
messages are one message, in which lists are joined and later values win. So an extended model begins with the bytes of
its base.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import checksum, write_bytes
from indexing.tokenization.backends import META_SYMBOL, SentencePiece
from indexing.tokenization.metadata import MODEL
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import count_characters, frequent_characters, line_ends_for, run_trainer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # ModelProto.SentencePiece.Type
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
# Options of the base's training that decide which pieces are allowed.
_OPTIONS = (
    "max_sentencepiece_length",
    "split_by_unicode_script",
    "split_by_whitespace",
    "split_by_number",
    "treat_whitespace_as_suffix",
    "split_digits",
    "allow_whitespace_only_pieces",
)
_ASCII = frozenset([*map(chr, range(128)), META_SYMBOL])


@dataclass(frozen=True)
class ScoredPiece:
    """A piece that the base lacks, with its score in a model of the corpus alone."""

    piece: str
    score: float


class SentencePieceBase:
    """A SentencePiece model to extend.

    Args:
        file: the model.
        tokenizer: the same tokenizer, installed.

    Raises:
        InputError: the model is neither BPE nor unigram.
    """

    kind = "sentencepiece"

    def __init__(self, file: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.checksum = checksum(file)
        self._data = file.read_bytes()
        self._model = parse(self._data)
        self._known = {item.piece for item in self._model.pieces}
        model_type = self._model.trainer_spec.model_type
        self._is_bpe = model_type == _BPE
        if model_type not in (_BPE, _UNIGRAM):
            raise InputError(f"{file} is a model of words or characters; only BPE and unigram models can be extended.")

    def learn(self, sample: Sequence[str], num_pieces: int, *, ascii: bool) -> list[ScoredPiece]:
        """Learn pieces that the base lacks, the most useful first: `num_pieces` of them, and a quarter more in reserve.

        Without `ascii`, no piece has an ASCII character or a blank.
        """
        sentences = [text.replace(META_SYMBOL, " ") for text in _processor(self._data).normalize(list(sample))]
        counts = count_characters(sentences)
        # ASCII characters that are spelled in bytes, such as line ends, stay so: they occur in texts of every language.
        eligible = Counter({key: count for key, count in counts.items() if not key.isascii()})
        characters = frequent_characters(eligible, num_pieces // 2, self._known)
        foreign = line_ends_for(counts, {*characters, *self._known})
        foreign |= {} if ascii else dict.fromkeys(map(ord, _ASCII), "\n")
        sentences = [sentence.translate(foreign) for sentence in sentences]
        enough, size = num_pieces + num_pieces // 4, 2 * num_pieces + len(counts) + len(self._declared()) + 3
        while True:
            trained = self._trained(sentences, size)
            new = [
                item for item in trained if item.piece not in self._known and (ascii or _ASCII.isdisjoint(item.piece))
            ]
            if len(new) >= enough or len(trained) < size // 2 or size > 2 * (enough + len(self._known) + len(counts)):
                break
            size *= 2
        # A BPE trainer lists characters last. They are the most useful, because each replaces several bytes.
        return sorted(new, key=lambda item: (self._is_bpe and len(item.piece) > 1, -item.score))

    def _declared(self) -> list[str]:
        return [item.piece for item in self._model.pieces if item.type == USER_DEFINED]

    def _trained(self, sentences: list[str], size: int) -> list[ScoredPiece]:
        options: dict[str, Any] = {name: getattr(self._model.trainer_spec, name) for name in _OPTIONS}
        options["model_type"] = "bpe" if self._is_bpe else "unigram"
        model = run_trainer(sentences, vocab_size=size, user_defined_symbols=self._declared(), **options)
        return [ScoredPiece(item.piece, item.score) for item in parse(model).pieces if item.type == NORMAL]

    def write(self, chosen: Sequence[ScoredPiece], folder: Path) -> Path:
        """Write the base with these pieces to `folder`; returns the file that `tokenizer.path` names."""
        scores = [item.score for item in self._model.pieces if item.type == NORMAL]
        low, high = min(scores), max(scores)
        if self._is_bpe:
            new = [(item.piece, low - 1 - rank, NORMAL) for rank, item in enumerate(chosen)]
        else:
            new = [(item.piece, min(max(item.score, low), high), NORMAL) for item in chosen]
        special, roles = self._special_pieces()
        write_bytes(folder / MODEL, with_pieces(self._data, [*special, *new], roles))
        return folder / MODEL

    def _special_pieces(self) -> tuple[list[tuple[str, float, int]], dict[str, str]]:
        """Pieces for the ids that installing gave to special tokens after the last piece, and their roles."""
        tokenizer = self.tokenizer
        pieces: list[tuple[str, float, int]] = []
        roles: dict[str, str] = {}
        for token in range(tokenizer.num_model_tokens, tokenizer.vocab_size):
            names = [role for role in ("bos", "eos", "pad") if getattr(tokenizer, f"{role}_id") == token]
            piece = f"<{'|'.join(names)}>"
            while piece in self._known:
                piece = f"<{piece}>"
            pieces.append((piece, 0.0, CONTROL))
            roles |= dict.fromkeys(names, piece)
        return pieces, roles

    def model(self, file: Path) -> SentencePiece:
        """Open the tokenizer that `write` wrote."""
        return SentencePiece(file)

    def unreachable(self, chosen: Sequence[ScoredPiece], file: Path) -> set[str]:
        """The pieces of a written model that do not encode to themselves, and so occur in no text."""
        processor = _processor(_verbatim(file.read_bytes()))
        encoded = processor.encode([item.piece for item in chosen])
        first = self.tokenizer.vocab_size
        return {item.piece for rank, item in enumerate(chosen) if encoded[rank] != [first + rank]}

    def cuts(self, chosen: Sequence[ScoredPiece]) -> list[list[int]]:
        """The base's ids for each piece."""
        return _processor(_verbatim(self._data)).encode([item.piece for item in chosen])


def _processor(data: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


@cache
def _messages() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2


def parse(data: bytes) -> Any:
    """Read a model file as a `ModelProto`.

    Its `pieces` have `piece`, `score` and `type`, in order of id. Its `trainer_spec` holds the options of the training.

    Raises:
        InputError: the file is cut short.
    """
    from google.protobuf.message import DecodeError

    try:
        return _messages().ModelProto.FromString(data)
    except DecodeError as error:
        raise InputError("The SentencePiece model is cut short. Copy it again.") from error


def with_pieces(data: bytes, pieces: list[tuple[str, float, int]], special: dict[str, str]) -> bytes:
    """Append pieces to a model.

    Args:
        data: the base model.
        pieces: (piece, score, type) of each new piece; they take the ids after the last one.
        special: role (`bos`, `eos` or `pad`) → piece that takes this role in the new model.
    """
    trainer = _messages().TrainerSpec(vocab_size=len(parse(data).pieces) + len(pieces))
    for role, piece in special.items():
        setattr(trainer, f"{role}_piece", piece)
    added = [_messages().ModelProto.SentencePiece(piece=piece, score=score, type=kind) for piece, score, kind in pieces]
    extension: bytes = _messages().ModelProto(pieces=added, trainer_spec=trainer).SerializeToString()
    return data + extension


def _verbatim(data: bytes) -> bytes:
    """Remove a model's normalizer: the result reads text as it is, with ▁ for a blank and no blank added in front."""
    plain = _messages().NormalizerSpec(
        name="identity", precompiled_charsmap=b"", add_dummy_prefix=False, remove_extra_whitespaces=False
    )
    normalizer: bytes = _messages().ModelProto(normalizer_spec=plain).SerializeToString()
    return data + normalizer
