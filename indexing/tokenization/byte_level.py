"""Byte-level BPE of a tokenizer.json by tiktoken: the same ids, several times as fast as the package `tokenizers`.

tokenizer.json ─► pattern of the pieces, rank of each token ─► tiktoken.Encoding
a text ─► ByteLevelBPE.encode ─► ids, or None: the text is for `tokenizers`

Why the ids are the same. Both libraries cut a text into pieces and join, again and again, the two neighboring tokens of
the lowest rank. They differ in which tokens they join: `tokenizers` the pairs in its list of merges, tiktoken all pairs
whose bytes are a token. Let a token be made by one merge only, and let `tokenizers` join the token's bytes alone to this
token, in the last step by this merge. Inside of a text these bytes go the same way, as long as no join crosses their
ends: joins are chosen by rank and place alone. So a pair whose bytes are the token is always the pair of its merge. This
is tested for every token. Tokens that their own bytes do not lead to are made in no text, and are left out.
"""

import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The characters that stand for the bytes in byte-level vocabularies since GPT-2: printable Latin-1 stands for itself, all
other bytes are written from 256 on."""

# GPT-2's pattern. Both libraries write it as here.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Bytes that are in no character of Unicode 3.2, so a vocabulary may lack them.
_UNUSED_BYTES = {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
# The same within pieces that end before and after each digit, so that blanks before a digit are one piece.
_GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"


class ByteLevelBPE:
    """A tokenizer.json whose texts tiktoken encodes.

    Attributes:
        ids: [ranks] uint32, the id of each rank of tiktoken.
    """

    def __init__(self, pattern: str, ids: Mapping[bytes, int], left_out: re.Pattern[str] | None, nfc: bool) -> None:
        """Create from the regular expression of the pieces and the tokens with their ids, lowest rank first.

        Texts in which `left_out` matches are left to `tokenizers`; so are, with `nfc`, texts that are not in Unicode's
        normal form C.
        """
        import tiktoken

        self.ids = np.fromiter(ids.values(), dtype=np.uint32, count=len(ids))
        ranks = {token: rank for rank, token in enumerate(ids)}
        self._encoding = tiktoken.Encoding("byte-level", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._left_out, self._nfc = left_out, nfc

    def encode(self, text: str) -> np.ndarray | None:
        """Token ids [t] uint32; None where this is not known to equal `tokenizers`."""
        if self._left_out is not None and self._left_out.search(text):
            return None
        if not text.isascii() and not (_is_old(text) and (not self._nfc or unicodedata.is_normalized("NFC", text))):
            return None
        try:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # in very long runs the pattern runs out of its stack; once this was a panic of Rust
            return None
        return self.ids[ranks]


def byte_level(content: Mapping[str, Any], tokenizer: Any) -> ByteLevelBPE | None:
    """The tokenizer for tiktoken; None if it has another kind of model, of pieces or of normalization.

    Args:
        content: of tokenizer.json.
        tokenizer: `tokenizers.Tokenizer` of this file.
    """
    normalizer = content.get("normalizer")
    pattern = _pattern(content.get("pre_tokenizer"))
    if pattern is None or not (normalizer is None or normalizer == {"type": "NFC"}):
        return None
    ids = _ids_by_rank(content["model"], tokenizer, {token["content"] for token in content.get("added_tokens", ())})
    if ids is None:
        return None
    # Special tokens are ordinary text here; others that were added are found in a text before it is cut into pieces.
    left_out = [token["content"] for token in content.get("added_tokens", ()) if not token["special"]]
    left_out += [chr(byte) for byte in range(128) if bytes([byte]) not in ids]
    left_out_pattern = re.compile("|".join(map(re.escape, left_out))) if left_out else None
    try:
        return ByteLevelBPE(pattern, ids, left_out_pattern, normalizer is not None)
    except (ImportError, ValueError):  # not installed, or a pattern that only `tokenizers` can read
        return None


def _pattern(pre_tokenizer: Any) -> str | None:
    """One regular expression for the pieces of a text; None if no such expression is known."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, Mapping) else []
    splits = list[str]()
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
                splits.append(regex)
            case {"type": "Digits", "individual_digits": True}:
                splits.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False} if part is parts[-1]:
                splits += [_GPT2] if part.get("use_regex", True) else []
                return _joined(splits)
    return None


def _joined(splits: list[str]) -> str | None:
    if splits == [r"\p{N}", _GPT2]:
        return _GPT2_DIGITS
    return splits[0] if len(splits) == 1 else None


def _ids_by_rank(model: Mapping[str, Any], tokenizer: Any, added: set[str]) -> dict[bytes, int] | None:
    """The bytes and ids of the tokens in the order in which they are joined: all bytes, then one token for each merge.

    None if tiktoken would join other tokens, see the top.
    """
    unusual = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "unk_token")
    if model.get("type") != "BPE" or any(model.get(name) for name in unusual):
        return None
    vocabulary = model["vocab"]
    merged = list[str]()
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merged.append(first + second)
    missing = {byte for character, byte in BYTES.items() if byte > 127 and character not in vocabulary}
    foreign = set().union(*merged) - BYTES.keys()
    if len(set(merged)) < len(merged) or foreign or not missing <= _UNUSED_BYTES:
        return None  # a token of two merges, characters that stand for no byte, or bytes that are no token
    ids = dict[bytes, int]()
    for token in [*BYTES, *merged]:
        if token in vocabulary and [piece.id for piece in tokenizer.model.tokenize(token)] == [vocabulary[token]]:
            ids[bytes(BYTES[character] for character in token)] = vocabulary[token]
    if model.get("ignore_merges") and len(ids) < len(vocabulary.keys() - added):
        return None  # a whole piece can be a token that no merges lead to
    return ids


@cache
def _old_characters() -> np.ndarray:
    """bool [0x110000], the characters of Unicode 3.2. Later ones can be letters to one library and unknown to the
    other."""
    return np.array([unicodedata.ucd_3_2_0.category(chr(code)) != "Cn" for code in range(0x110000)])


def _is_old(text: str) -> bool:
    return bool(_old_characters()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")].all())
