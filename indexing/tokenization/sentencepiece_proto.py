"""SentencePiece model files, read and extended with the protobuf classes that sentencepiece ships.

Concatenated Protocol Buffers messages are one message, in which lists are joined and later values win. So an extended model
begins with the bytes of its base.
"""

from functools import cache
from typing import Any

from indexing.store.errors import InputError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # ModelProto.SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType


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


def verbatim(data: bytes) -> bytes:
    """Remove a model's normalizer: the result reads text as it is, with ▁ for a blank and no blank added in front."""
    plain = _messages().NormalizerSpec(
        name="identity", precompiled_charsmap=b"", add_dummy_prefix=False, remove_extra_whitespaces=False
    )
    normalizer: bytes = _messages().ModelProto(normalizer_spec=plain).SerializeToString()
    return data + normalizer
