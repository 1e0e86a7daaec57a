"""SentencePiece model files, read and extended with the protobuf classes that sentencepiece ships.

Concatenated Protocol Buffers messages are one message, in which lists are joined and later values win. So an extended model
begins with the bytes of its base.
"""

from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from indexing.store.errors import InputError

_model: Any = sentencepiece_model_pb2
_types = _model.ModelProto.SentencePiece
NORMAL, CONTROL, USER_DEFINED = _types.NORMAL, _types.CONTROL, _types.USER_DEFINED
UNIGRAM, BPE = _model.TrainerSpec.UNIGRAM, _model.TrainerSpec.BPE


def parse(data: bytes) -> Any:
    """Read a model file as a `ModelProto`.

    Its `pieces` have `piece`, `score` and `type`, in order of id. Its `trainer_spec` holds the options of the training.

    Raises:
        InputError: the file is cut short.
    """
    try:
        return _model.ModelProto.FromString(data)
    except DecodeError as error:
        raise InputError("The SentencePiece model is cut short. Copy it again.") from error


def with_pieces(data: bytes, pieces: list[tuple[str, float, int]], special: dict[str, str]) -> bytes:
    """Append pieces to a model.

    Args:
        data: the base model.
        pieces: (piece, score, type) of each new piece; they take the ids after the last one.
        special: role (`bos`, `eos` or `pad`) → piece that takes this role in the new model.
    """
    trainer = _model.TrainerSpec(vocab_size=len(parse(data).pieces) + len(pieces))
    for role, piece in special.items():
        setattr(trainer, f"{role}_piece", piece)
    added = [_types(piece=piece, score=score, type=kind) for piece, score, kind in pieces]
    extension: bytes = _model.ModelProto(pieces=added, trainer_spec=trainer).SerializeToString()
    return data + extension


def verbatim(data: bytes) -> bytes:
    """Remove a model's normalizer: the result reads text as it is, with ▁ for a blank and no blank added in front."""
    plain = _model.NormalizerSpec(
        name="identity", precompiled_charsmap=b"", add_dummy_prefix=False, remove_extra_whitespaces=False
    )
    normalizer: bytes = _model.ModelProto(normalizer_spec=plain).SerializeToString()
    return data + normalizer
