"""The bytes of a text file: blocks that end between two characters, decoded, and what is not UTF-8.

stream ─ `text_blocks` ─ bytes that end between characters ─ `TextSeen.decoded` ─ text, its size and hash, its replacements
"""

import codecs
import hashlib
import io
import re
from collections.abc import Iterator

from indexing.corpus.streams import DAMAGED

BLOCK_BYTES = 1 << 20
"""Bytes of a block, at least."""
MOST_OTHER_BYTES = 0.2
"""Share of a text file; 0.12 to 0.14 in Latin-1 with many accents, 0.3 and more in programs and images."""
MOST_CONTROLS = 0.05
"""Share of the characters of decoded text; next to none in text, 0.1 and more in random bytes in any charset."""
BOM = b"\xef\xbb\xbf"

# Control characters that text has no use for (it has tabs, line ends and the escape of terminals), and characters for
# private use.
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\ue000-\uf8ff]")
_CUT = re.compile(r"(?<=\S)\s{1,8}(?=\S)")  # as in `indexing/tokenization/pieces.py`
_GUESS_BYTES = 1 << 16
_FREQUENT_CHINESE = "的一是不了人在有我他这之"
_FREQUENT_SHARE = 0.05  # in Chinese text about 0.15


class TextSeen:
    """What one pass over the blocks of a text file finds out.

    Attributes:
        stored, size: bytes in the file, and UTF-8 bytes of the text.
        digest: hash of the text.
        undecodable, first_line, first_undecodable: number of replacements; line and byte of the first.
        other_bytes: bytes that text in UTF-8 does not have: undecodable ones, and NUL.
        lines: line ends.
        head: the first block.
        is_blank: whether all of it is white space.
        longest_run: bytes of the longest run of blocks without a place at which the text can be cut, a blank between
            two words.
    """

    def __init__(self) -> None:
        self.stored = self.size = self.undecodable = self.first_line = self.first_undecodable = 0
        self.other_bytes = self.lines = 0
        self.is_blank, self.digest, self.head = True, text_digest(), b""
        self.longest_run = self._run = 0

    @property
    def is_binary(self) -> bool:
        """Whether it has more other bytes than text has."""
        return self.other_bytes > MOST_OTHER_BYTES * max(1, self.stored)

    def decoded(self, data: bytes) -> str:
        """Decode the next block, which ends between two characters."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data.decode(errors="replace")
            if not self.undecodable:
                self.first_line = 1 + self.lines + data.count(b"\n", 0, error.start)
                self.first_undecodable = data[error.start]
            count = num_undecodable(data, text)
            self.undecodable += count
            self.other_bytes += count
        self.head = self.head or data
        self.other_bytes += data.count(0)
        self.lines += data.count(b"\n")
        self.stored += len(data)
        self._run = 0 if _CUT.search(text) else self._run + len(data)
        self.longest_run = max(self.longest_run, self._run)
        self.is_blank = self.is_blank and (not text or text.isspace())
        encoded = text.encode()
        self.size += len(encoded)
        self.digest.update(encoded)
        return text


def text_digest() -> hashlib.blake2b:
    """The hash of a document's text, to be updated with its UTF-8 bytes; it decides the split."""
    return hashlib.blake2b(digest_size=8)


def text_blocks(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """Read a text file in blocks of at least 1 MiB that end between two characters, without the byte order mark.

    Raises:
        the exceptions `DAMAGED`, after the contents before the damage.
    """
    waiting, is_first, damage = bytearray(), True, None
    while True:
        try:
            block = stream.read1(BLOCK_BYTES)
        except DAMAGED as error:
            block, damage = b"", error
        waiting += block
        if block and len(waiting) < BLOCK_BYTES:
            continue
        end = _end_of_characters(waiting) if block else len(waiting)
        if data := bytes(waiting[:end].removeprefix(BOM) if is_first else waiting[:end]):
            yield data
        del waiting[:end]
        is_first = False
        if damage is not None:
            raise damage
        if not block:
            return


def _end_of_characters(data: bytearray) -> int:
    """Where a block can end so that both sides are decoded as the whole is: before the last byte that begins a
    character.

    That also holds for bytes that are not UTF-8, since an error ends before such a byte. After four bytes that continue
    a character, no character continues.
    """
    for end in range(len(data) - 1, len(data) - 5, -1):
        if not 0x80 <= data[end] < 0xC0:
            return end
    return len(data)


def num_undecodable(data: bytes, text: str) -> int:
    """Number of replacements in `data` decoded as `text`. A U+FFFD that the file itself contains is ordinary text."""
    return text.count("\ufffd") - data.count("\ufffd".encode())


def is_noise(text: str) -> bool:
    """Whether decoded text has more replacements or control characters than text has."""
    if text.count("\ufffd") > MOST_OTHER_BYTES * len(text):
        return True
    return sum(1 for _ in _CONTROLS.finditer(text)) > MOST_CONTROLS * len(text)


def encoding_of(data: bytes, name: str) -> str:
    """Which encoding other than UTF-8 bytes seem to have, and how to convert the file; empty if unknown.

    UTF-16 begins with a mark. Chinese text in GBK is recognized by its most frequent characters: in text of another
    encoding that is read as GBK they are rare.
    """
    encoding = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
    if not encoding:
        try:
            text = codecs.getincrementaldecoder("gb18030")().decode(data[:_GUESS_BYTES])
        except UnicodeDecodeError:
            return ""
        frequent, chinese = sum(map(text.count, _FREQUENT_CHINESE)), len(re.findall("[\u4e00-\u9fff]", text))
        encoding = "GBK" if frequent > _FREQUENT_SHARE * chinese else ""
    return f"it looks like {encoding}; convert it with `iconv -f {encoding} -t UTF-8 {name} > NEW`" if encoding else ""
