"""The file of a SentencePiece model: what stands in it, and how pieces are put after the last one.

It is a message of Protocol Buffers (`sentencepiece_model.proto`): repeated fields of (number, value). A property of that
format does all the work: messages one after the other are one message, in which lists are joined and later values win.
So an extended model begins with the very bytes of its base. The generated classes of the sentencepiece package are not
used: they need a protobuf package of the release they were generated with, which nobody installs with sentencepiece, and
cannot be imported beside another copy of them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from indexing.store.errors import InputError

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
UNIGRAM, BPE = 1, 2

# Options by which the trainer decides what may be a piece: number in `TrainerSpec`, and the value where none is written.
_OPTIONS = {
    "model_type": (3, UNIGRAM),
    "max_sentencepiece_length": (20, 16),
    "split_by_unicode_script": (21, True),
    "split_by_whitespace": (22, True),
    "split_by_number": (23, True),
    "treat_whitespace_as_suffix": (24, False),
    "split_digits": (25, False),
    "allow_whitespace_only_pieces": (26, False),
}
_VOCAB_SIZE = 4
_SPECIAL_PIECES = {"bos": 46, "eos": 47, "pad": 48}


@dataclass(frozen=True)
class ModelFile:
    """What stands in a model file.

    Attributes:
        pieces: (piece, score, type) by id.
        options: of the training, as `SentencePieceTrainer.train` takes them, and `model_type`: UNIGRAM, BPE, or another.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)


def parse(data: bytes) -> ModelFile:
    """Read a model that sentencepiece has accepted.

    Raises:
        InputError: it is cut short.
    """
    model = ModelFile(options={name: int(default) for name, (_, default) in _OPTIONS.items()})
    names = {number: name for name, (number, _) in _OPTIONS.items()}
    for number, value in _fields(data):
        if number == _PIECES and isinstance(value, bytes):
            piece: dict[int, Any] = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(_SCORE, bytes(4)))
            model.pieces.append((piece.get(_PIECE, b"").decode(), score, piece.get(_TYPE, NORMAL)))
        elif number == _TRAINER and isinstance(value, bytes):
            model.options.update({names[key]: option for key, option in _fields(value) if key in names})  # type: ignore[misc]
    return model


def with_pieces(data: bytes, pieces: list[tuple[str, float, int]], special: dict[str, str]) -> bytes:
    """The model with more pieces (piece, score, type) after its last one.

    Args:
        data: the base model.
        pieces: to be added.
        special: which piece stands for `bos`, `eos` or `pad` from now on.
    """
    size = len(parse(data).pieces) + len(pieces)
    trainer = _field(_VOCAB_SIZE, size)
    trainer += b"".join(_field(_SPECIAL_PIECES[role], piece.encode()) for role, piece in special.items())
    added = (
        _field(_PIECE, piece.encode()) + _field(_SCORE, score) + (_field(_TYPE, kind) if kind != NORMAL else b"")
        for piece, score, kind in pieces
    )
    return data + b"".join(_field(_PIECES, piece) for piece in added) + _field(_TRAINER, trainer)


def verbatim(data: bytes) -> bytes:
    """The model without its normaliser: it reads a text as it stands, ▁ for a blank, and puts no blank before it."""
    # Of NormalizerSpec: name, precompiled_charsmap, add_dummy_prefix, remove_extra_whitespaces.
    plain = _field(1, b"identity") + _field(2, b"") + _field(3, 0) + _field(4, 0)
    return data + _field(_NORMALIZER, plain)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: a whole number, or the bytes of anything else."""
    position = 0
    try:
        while position < len(data):
            key, position = _read_varint(data, position)
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, position = _read_varint(data, position)
                yield number, value
                continue
            size = {1: 8, 5: 4}.get(wire)
            if size is None:
                size, position = _read_varint(data, position)
            if position + size > len(data):
                raise IndexError(position)
            yield number, data[position : position + size]
            position += size
    except IndexError as error:
        raise InputError("The SentencePiece model is cut short. Copy it again.") from error


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value, position = value | (byte & 127) << shift, position + 1
        if byte < 128:
            return value, position
        shift += 7


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
